"""What can be wrong with a checkpoint, and the two errors that say so."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from eke.errors import EkeError

if TYPE_CHECKING:
    from eke.checkpoint.ticket import Ticket

Kind = Literal["corrupt", "incomplete", "foreign"]
"""`corrupt`: bytes are there and wrong. `incomplete`: a file, or the end of one, is not there.
`foreign`: not something that this version of eke wrote."""

KINDS: tuple[Kind, ...] = ("corrupt", "incomplete", "foreign")


def printable(text: str, longest: int = 300) -> str:
    """Text from a file as it can be shown anywhere: no newline, no escape sequence of a terminal,
    nothing that turns the direction of writing, no half of a character; and not without end."""
    shown = text if len(text) <= longest else text[:longest] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: in which file, and in which tensor if it is inside one."""

    file: str
    tensor: str | None
    kind: Kind
    detail: str

    def __str__(self) -> str:
        where = printable(self.file)
        if self.tensor is not None:
            where += f", tensor {printable(self.tensor)}"
        return f"{where}: {printable(self.detail)}"

    def to_json(self) -> dict[str, Any]:
        """The problem as JSON values."""
        return {
            "file": self.file,
            "tensor": self.tensor,
            "kind": self.kind,
            "detail": self.detail,
        }


def worst(problems: Iterable[Problem]) -> Kind:
    """The kind that stands for them all: corrupt before incomplete before foreign."""
    kinds = {problem.kind for problem in problems}
    return next(kind for kind in KINDS if kind in kinds)


class CorruptCheckpoint(EkeError):
    """A checkpoint's bytes are not the ones that were written.

    Attributes:
        path: the checkpoint's directory.
        problems: what is wrong, each with its file and tensor; never empty.
        partly_restored: whether live state was changed before it was found.
    """

    def __init__(
        self, path: str, problems: Sequence[Problem], *, partly_restored: bool = False
    ) -> None:
        self.path, self.problems = path, tuple(problems)
        self.partly_restored = partly_restored
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        advice = "Restore an older step, or let restore(fallback=True) take the newest sound one"
        super().__init__(
            f"the checkpoint {path} is {worst(problems)}: {problems[0]}{more}",
            rule="the state is now partly restored from it" if partly_restored else None,
            fix=f"Do not train on with it. {advice}" if partly_restored else advice,
        )


class SaveError(EkeError):
    """A save failed; the previous checkpoint is untouched. `ticket` is the failed save's."""

    ticket: Ticket | None = None


_FIXES = {
    errno.ENOSPC: "Free space there, keep fewer checkpoints, or choose another directory",
    errno.EDQUOT: "Free space in your quota, keep fewer checkpoints, or choose another directory",
    errno.EROFS: "Make the file system writable, or choose another directory",
    errno.EACCES: "Give yourself the right to write there, or choose another directory",
    errno.EPERM: "Give yourself the right to write there, or choose another directory",
    errno.EIO: "The disk is failing: look at the system's log, and choose another disk",
}


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Turn the disk's refusal to be read into the error that a user is shown."""
    try:
        yield
    except OSError as error:
        raise disk_error(f"reading {path}", error) from error


def disk_error(doing: str, error: OSError) -> EkeError:
    """What a user is told when the disk refuses something."""
    return EkeError(
        f"{doing} failed: {error.filename or 'the disk'}: {error.strerror or error}",
        fix=_FIXES.get(error.errno or 0, "See to the disk, then try again"),
    )
