from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eke.data import tables
from eke.data.tables import ArrowSource, ParquetSource, open_datasets_folder
from eke.errors import EkeError, InputError

ROWS = [
    {
        "id": i,
        "messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "é"}],
        "note": None if i % 2 else "x",
    }
    for i in range(23)
]


def write_stream(path: Path, rows: list[Any], batch: int = 5) -> None:
    table = pa.Table.from_pylist(rows, pa.Table.from_pylist(ROWS).schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def save_to_disk(folder: Path, shards: list[list[Any]]) -> Path:
    """The layout that `datasets` 5 writes."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write_stream(folder / name, rows)
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=4)
    return path


@pytest.mark.parametrize("cache_bytes", [0, 1 << 28])
def test_parquet_gives_back_its_rows_in_any_order(
    parquet: Path, cache_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "CACHE_BYTES", cache_bytes)
    source = ParquetSource(parquet)
    order = [(i * 7) % len(ROWS) for i in range(len(ROWS))]
    assert [source[i] for i in order] == [ROWS[i] for i in order]
    assert len(source._groups) == (1 if cache_bytes == 0 else 6)
    assert source.origin(17) == f"{parquet} row 17"


def test_the_groups_used_last_stay(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ParquetSource(parquet)
    size = source._chunk(0).nbytes
    monkeypatch.setattr(tables, "CACHE_BYTES", int(size * 2.5))
    for i in (0, 4, 0, 8):
        assert source[i] == ROWS[i]
    assert list(source._groups) == [0, 2]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_tables_work_in_other_processes(parquet: Path, tmp_path: Path, method: str) -> None:
    folder = save_to_disk(tmp_path / "ds", [ROWS[:11], ROWS[11:]])
    for source in (ParquetSource(parquet), open_datasets_folder(folder)):
        assert source[3] == ROWS[3]
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(source.__getitem__, [0, 12, 22]) == [ROWS[0], ROWS[12], ROWS[22]]


def test_a_forked_child_opens_the_file_itself(parquet: Path) -> None:
    source = ParquetSource(parquet)
    handle = source._open_here()
    assert source._open_here() is handle
    child = os.fork()
    if child == 0:
        os._exit(source._open_here() is handle)
    assert os.waitpid(child, 0)[1] == 0


def test_datasets_folder_in_shards(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "ds", [ROWS[:11], ROWS[11:]])
    source = open_datasets_folder(folder)
    assert source.name == str(folder)
    assert list(source) == ROWS
    assert source.origin(12) == f"{folder}/data-00001-of-00002.arrow row 1"
    copy = pickle.loads(pickle.dumps(source))  # noqa: S301 (our own bytes)
    assert list(copy) == ROWS


def test_dataset_dict_gives_its_train_split(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "dd" / "train", [ROWS[:3]])
    save_to_disk(tmp_path / "dd" / "test", [ROWS[3:]])
    (tmp_path / "dd" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert list(open_datasets_folder(tmp_path / "dd")) == ROWS[:3]
    assert list(open_datasets_folder(tmp_path / "dd" / "test")) == ROWS[3:]


def test_dataset_dict_without_train(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(InputError, match=r"no split 'train'; got \['a', 'b'\]"):
        open_datasets_folder(tmp_path)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (None, "not one that datasets' save_to_disk wrote"),
        ("{", "cannot read"),
        ("[]", "is not a JSON object"),
        ("{}", "names no data files"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "not in the folder"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "cannot read"),
        ('{"_indices_data_files": [{"filename": "i"}], "_data_files": [1]}', "flatten_indices"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, state: str | None, says: str) -> None:
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    with pytest.raises(InputError, match=says):
        open_datasets_folder(tmp_path)


@pytest.mark.parametrize("kind", [ParquetSource, ArrowSource])
def test_damaged_and_empty_files(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"PAR1 this is no table at all PAR1")
    with pytest.raises(InputError, match="cannot read"):
        kind(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="cannot read"):
        kind(path)


def test_tables_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS)[:0], tmp_path / "x.parquet")
    with pytest.raises(InputError, match="holds no rows"):
        ParquetSource(tmp_path / "x.parquet")
    write_stream(tmp_path / "x.arrow", [])
    with pytest.raises(InputError, match="holds no rows"):
        ArrowSource(tmp_path / "x.arrow")


def test_a_damaged_row_group_is_reported(parquet: Path) -> None:
    data = bytearray(parquet.read_bytes())
    data[4:60] = b"\xff" * 56  # the first group's pages; the footer is whole
    parquet.write_bytes(data)
    source = ParquetSource(parquet)
    with pytest.raises(EkeError, match="cannot read"):
        source[0]
