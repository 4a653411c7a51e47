"""One outcome for all ranks: if a step of a save or restore fails on one, it fails on all.

Every rank calls `agree` the same number of times in the same order, also when its own work
failed, so that no rank waits for one that has given up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eke.checkpoint.errors import CorruptCheckpoint, Problem, disk_error
from eke.distributed import gather_objects, world
from eke.errors import EkeError, InputError


def agree(doing: str, work: Callable[[], Any]) -> list[Any]:
    """Do `work` here, and return what it returned on every rank, in rank order.

    Args:
        doing: what is being done, for the other ranks' error: "saving step 5".
        work: returns JSON values.

    Raises:
        EkeError: another rank failed; of that rank's class, naming the rank and its cause.
        Exception: what `work` raised here, once the other ranks know; an `OSError` as an `EkeError`
            that says what to do.
    """
    try:
        value = work()
    except Exception as error:
        shown = disk_error(doing, error) if isinstance(error, OSError) else error
        if world().size > 1:
            gather_objects({"error": describe(shown)})
        if shown is error:
            raise
        raise shown from error
    rows = gather_objects({"value": value})
    for rank, row in enumerate(rows):
        if "error" in row:
            raise rebuild(doing, rank, row["error"])
    return [row["value"] for row in rows]


def describe(error: BaseException) -> dict[str, Any]:
    """An error as JSON values, for another rank."""
    if isinstance(error, CorruptCheckpoint):
        problems = [problem.to_json() for problem in error.problems]
        partly = error.partly_restored
        return {"kind": "corrupt", "path": error.path, "problems": problems, "partly": partly}
    kind = "input" if isinstance(error, InputError) else "run"
    text = str(error) if isinstance(error, EkeError) else f"{type(error).__name__}: {error}"
    return {"kind": kind, "text": text}


def rebuild(doing: str, rank: int, row: dict[str, Any]) -> EkeError:
    """The error that another rank described, naming that rank."""
    if row["kind"] == "corrupt":
        problems = [Problem(**problem) for problem in row["problems"]]
        return CorruptCheckpoint(row["path"], problems, partly_restored=row["partly"])
    kind = InputError if row["kind"] == "input" else EkeError
    return kind(f"{doing} failed on rank {rank}: {row['text']}")
