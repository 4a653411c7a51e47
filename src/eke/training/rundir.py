"""A run's directory: who owns it, what it holds, and whether a configuration may continue it.

Properties: one process trains in a directory at a time; `run.toml` and `status.json` are always
whole; a configuration that would give another run is refused before anything is touched, naming
every key that differs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eke.budget import Ledger
from eke.budget.files import write_atomic
from eke.budget.jsonl import JsonlFile, Record, read_records
from eke.errors import InputError
from eke.training.config import RunConfig
from eke.training.raising import LIMIT_KEYS

FREE_KEYS = {("run", "dir"), ("run", "name"), ("data", "workers")}
"""Keys that do not change what the run computes, besides all of [log] and [checkpoint]."""
FREE_SECTIONS = {"log", "checkpoint"}


LOGS = {"ledger.jsonl", "metrics.jsonl", "decisions.jsonl"}


def differences(stored: RunConfig, given: RunConfig) -> list[tuple[str, Any, Any]]:
    """Keys in which `given` asks for another run than `stored` is: (key, stored, given).

    A key that `given` leaves to eke (`auto`, or unset where eke fills it in) agrees with any
    stored value.
    """
    found = []
    old, new = stored.model_dump(mode="json"), given.model_dump(mode="json")
    for section, keys in new.items():
        for key, value in keys.items():
            before = old[section][key]
            if _is_free(section, key, before) and not (section == "budget" and value is None):
                continue
            left_to_eke = value == "auto" or (section, key, value) == ("batch", "order_seed", None)
            if value != before and not left_to_eke:
                found.append((f"{section}.{key}", before, value))
    return found


def _is_free(section: str, key: str, before: object) -> bool:
    """Whether a run may go on with another value than `before`."""
    # Where too long a sample is an error, none has been trained on: the policy may still change.
    undecided = (section, key, before) == ("data", "overlength", "error")
    if section == "budget" and key in LIMIT_KEYS:
        return before is not None  # a limit that is there; `differences` asks that it stays
    return section in FREE_SECTIONS or (section, key) in FREE_KEYS or undecided


def continued(stored: RunConfig, given: RunConfig) -> RunConfig:
    """`stored`, with what `given` may say anew: its free keys (but for `auto`) and sections."""
    values: dict[str, dict[str, Any]] = {}
    for section, keys in given.model_dump().items():
        for key, value in keys.items():
            before = getattr(getattr(stored, section), key)
            if _is_free(section, key, before) and (section in FREE_SECTIONS or value != "auto"):
                values.setdefault(section, {})[key] = value
    return stored.with_values(values)


def read_status(path: Path) -> dict[str, Any]:
    """The run's last known state, or `{}`."""
    try:
        status = json.loads((path / "status.json").read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return status if isinstance(status, dict) else {}


def silent_starts(records: Sequence[Record]) -> int:
    """How many processes have opened this ledger since the last one that billed its start-up:
    they were killed before they could."""
    silent = 0
    for record in records:
        if record.value.get("kind") == "opened":
            silent += 1
        elif record.value.get("what") == "startup":
            silent = 0
    return silent


class RunDir:
    """The directory of one run, held by this process until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._found: frozenset[str] | None = None  # what lay in the directory; None: no directory
        self.silent_starts = 0  # processes that opened the ledger and died before their first bill
        self.ledger: Ledger
        self.metrics: JsonlFile
        self.decisions: JsonlFile

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "run.toml"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    def stored_config(self, given: RunConfig) -> RunConfig | None:
        """The configuration that this run was started with, if `given` may continue it.

        Raises:
            InputError: the directory is something else, or belongs to another configuration.
        """
        if not self.path.exists():
            return None
        if not self.path.is_dir():
            raise InputError(
                "the run's directory is a file",
                value=str(self.path),
                fix="Choose another run.name or run.dir",
            )
        if not self.config_path.exists():
            # A first start that was killed leaves its logs, and no configuration yet.
            names = {p.name for p in self.path.iterdir() if not p.name.startswith(".")}
            strangers = names - LOGS
            if strangers:
                raise InputError(
                    "the run's directory holds something that is not a run",
                    value=str(self.path),
                    rule="a run starts in a new or empty directory",
                    fix="Choose another run.name or run.dir",
                )
            return None
        stored = RunConfig.load(self.config_path)
        differ = differences(stored, given)
        if differ:
            listing = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, old, new in differ)
            raise InputError(
                f"{self.path} belongs to a run with another configuration: {listing}",
                fix=f"To continue that run, train from {self.config_path}; to start anew, "
                f"choose another run.name (--set run.name=...) or delete {self.path}",
            )
        return stored

    def open(self) -> None:
        """Take the directory and open its logs.

        Raises:
            InputError: another process trains in it, or it cannot be written.
        """
        try:
            if self.path.exists():
                self._found = frozenset(p.name for p in self.path.iterdir())
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(
                f"cannot write to the run's directory {self.path}: {error.strerror}",
                fix="Choose another run.dir, or mend its permissions",
            ) from error
        try:
            # A record lock, which loader workers do not inherit: they outlive a killed trainer by
            # seconds, and would keep its directory locked.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            self._lock = None
            raise InputError(
                "another process is training in this run's directory",
                value=str(self.path),
                fix="Wait for it or stop it; or choose another run.name",
            ) from error
        try:
            self.silent_starts = silent_starts(read_records(self.path / "ledger.jsonl"))
            self.ledger = Ledger(self.path / "ledger.jsonl")
            self.ledger.note("opened", pid=os.getpid())
            self.metrics = JsonlFile(self.path / "metrics.jsonl")
            self.decisions = JsonlFile(self.path / "decisions.jsonl")
        except BaseException:
            os.close(self._lock)
            self._lock = None
            raise

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved configuration."""
        write_atomic(self.config_path, config.to_toml())

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small JSON file whole."""
        write_atomic(self.path / name, json.dumps(dict(value), indent=1) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read it back; `{}` when it is absent."""
        try:
            value = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return {}
        return dict(value)

    def write_status(self, state: str, **more: Any) -> None:
        """Say where the run is: `running`, `finished`, `interrupted` or `failed`."""
        self.write_json("status.json", {"state": state, "t": time.time(), **more})

    def offsets(self) -> dict[str, int]:
        """Where each log ends now, after making it durable."""
        self.ledger.sync()
        self.metrics.sync()
        self.decisions.sync()
        return {
            "ledger": self.ledger.offset,
            "metrics": self.metrics.offset,
            "decisions": self.decisions.offset,
        }

    def rewind(self, offsets: Mapping[str, int], step: int) -> None:
        """Mark what was logged after a checkpoint as undone."""
        now = time.time()
        self.ledger.resume(offsets["ledger"], step)
        self.metrics.mark_resume(offsets["metrics"], step=step, t=now)
        self.decisions.mark_resume(offsets["decisions"], step=step, t=now)

    def discard(self) -> None:
        """Remove what this process put into a directory in which nothing has happened yet."""
        # Under the lock, so that no other process starts in what is being removed.
        for path in [] if self._found is None else list(self.path.iterdir()):
            if path.name not in (self._found or ()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if self._found is None:
            shutil.rmtree(self.path)
        self.close()

    def close(self) -> None:
        """Close the logs and let the directory go."""
        if self._lock is None:
            return
        self.ledger.close()
        self.metrics.close()
        self.decisions.close()
        os.close(self._lock)
        self._lock = None
