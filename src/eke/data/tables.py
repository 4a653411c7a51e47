"""Parquet files and Hugging Face `datasets` folders, read with pyarrow alone.

Parquet is decoded a row group at a time, and the groups last used are kept up to
`CACHE_BYTES` a file and process. A `datasets` folder (`save_to_disk`) holds Arrow streams,
which are mapped into memory: no copy, any order of access.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

from eke.data.base import FileSource, JoinedSource, Row, Source
from eke.data.extras import require
from eke.errors import InputError

CACHE_BYTES = 256 << 20
"""Decoded row groups that a process keeps of one file; at least one is kept, however large."""


class TableSource(FileSource):
    """The rows of an Arrow-readable file, which come in chunks.

    Raises:
        InputError: the file has no row, or pyarrow cannot read it.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        super().__init__(path, name)
        self._handle: Any = None
        self._pid = -1
        self._ends: list[int] = list(accumulate(self._chunk_lengths(self._open_here())))
        self._refuse_empty()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_pid": -1}

    def origin(self, i: int) -> str:
        """`file row i`, from 0, as pyarrow and pandas count."""
        return f"{self.name} row {i}"

    def _row(self, i: int) -> Row:
        chunk = bisect_right(self._ends, i)
        at = i - (self._ends[chunk - 1] if chunk else 0)
        row: Row = self._read(lambda: self._chunk(chunk).slice(at, 1).to_pylist()[0])
        return row

    def _open_here(self) -> Any:
        """This process's handle: a child does not use its parent's Arrow objects."""
        if self._handle is None or self._pid != os.getpid():
            self._check_unchanged()
            self._handle = self._read(self._open)
            self._pid = os.getpid()
        return self._handle

    def _read(self, action: Any) -> Any:
        pyarrow = require("pyarrow", "reading Parquet files and datasets folders")
        try:
            return action()
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(
                f"cannot read {self.path}: {error}", fix="Write or fetch the file again"
            ) from error

    @abstractmethod
    def _open(self) -> Any:
        """A handle for this process."""

    @abstractmethod
    def _chunk_lengths(self, handle: Any) -> list[int]:
        """The number of rows in each chunk."""

    @abstractmethod
    def _chunk(self, number: int) -> Any:
        """A chunk as a pyarrow Table or RecordBatch."""


class ParquetSource(TableSource):
    """The rows of a Parquet file."""

    def _open(self) -> Any:
        require("pyarrow", "reading Parquet files")
        parquet = require("pyarrow.parquet", "reading Parquet files")
        self._groups: OrderedDict[int, Any] = OrderedDict()
        return parquet.ParquetFile(self.path, memory_map=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_groups": OrderedDict()}

    def _chunk_lengths(self, handle: Any) -> list[int]:
        meta = handle.metadata
        return [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]

    def _chunk(self, number: int) -> Any:
        handle = self._open_here()
        if number not in self._groups:
            # One thread: Arrow's pool does not outlive a fork on every version.
            self._groups[number] = handle.read_row_group(number, use_threads=False)
            size = sum(group.nbytes for group in self._groups.values())
            while size > CACHE_BYTES and len(self._groups) > 1:
                size -= self._groups.popitem(last=False)[1].nbytes
        self._groups.move_to_end(number)
        return self._groups[number]


class ArrowSource(TableSource):
    """The rows of an Arrow IPC stream, as `datasets` writes them."""

    def _open(self) -> Any:
        pyarrow = require("pyarrow", "reading datasets folders")
        with pyarrow.ipc.open_stream(pyarrow.memory_map(str(self.path), "r")) as stream:
            return list(stream)

    def _chunk_lengths(self, handle: Any) -> list[int]:
        return [batch.num_rows for batch in handle]

    def _chunk(self, number: int) -> Any:
        return self._open_here()[number]


def open_datasets_folder(folder: Path, name: str | None = None) -> Source:
    """A folder written by `datasets`' `save_to_disk`; of a DatasetDict, its split `train`.

    Raises:
        InputError: the folder is something else, or is damaged, or has no split `train`.
    """
    name = str(folder) if name is None else name
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or "train" not in splits:
            raise InputError(
                f"the datasets folder {folder} has no split 'train'",
                value=splits,
                fix="Name the folder of one split instead",
            )
        folder, name = folder / "train", f"{name}/train"
    if not (folder / "state.json").is_file():
        raise InputError(
            f"{folder} is a folder, but not one that datasets' save_to_disk wrote",
            rule="such a folder holds state.json or dataset_dict.json",
            fix=f"For files in it, name them with a glob such as '{folder}/*.jsonl'",
        )
    state = _json(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InputError(
            f"{folder} stores a selection of rows beside the rows, as old versions of datasets did",
            fix="Load it, call flatten_indices() and save_to_disk() again",
        )
    files = state.get("_data_files")
    if not isinstance(files, list) or not files:
        raise InputError(f"{folder}/state.json names no data files", fix="Save the dataset again")
    parts = []
    for entry in files:
        filename = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(filename, str) or Path(filename).name != filename:
            raise InputError(
                f"{folder}/state.json names a data file that is not in the folder",
                value=filename,
                fix="Save the dataset again",
            )
        parts.append(ArrowSource(folder / filename, f"{name}/{filename}"))
    return JoinedSource(parts, name)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {error}", fix="Save the dataset again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON object", fix="Save the dataset again")
    return value
