"""Out of memory: all ranks learn of it, lower the cap together, and go on.

Nothing of a step that did not fit counts: its gradients are dropped, its samples return to the
loader. An evaluation begins again. What either took is billed as lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from eke.batching import DynamicLoader
from eke.distributed import world
from eke.errors import EkeError

if TYPE_CHECKING:  # it is prepared by what asks here whether memory ran out
    from eke.training.session import Session

SHARE = 0.75
"""The next cap, as a share of the micro-batch that was too large."""

_SIGNS = (
    "can't allocate memory",  # DefaultCPUAllocator
    "not enough memory",  # the same, on another system
    "out of memory",
    "bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "could not create a memory object",  # oneDNN
)


class Shortage(NamedTuple):
    """A micro-batch that did not fit: its padded tokens, its samples, and the error's text."""

    tokens: int
    samples: int
    error: str

    @classmethod
    def of(cls, error: BaseException, tokens: int, samples: int) -> Shortage:
        """Of an error's first line."""
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return cls(tokens, samples, text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that there was not enough memory, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def lowered_cap(cap: int, shortages: Mapping[int, Shortage]) -> int:
    """The next cap on a micro-batch's tokens, after shortages by rank.

    Raises:
        EkeError: a single sample did not fit, so that no cap would help.
    """
    for rank, shortage in sorted(shortages.items()):
        if shortage.samples <= 1:
            where = "" if world().size == 1 else f"rank {rank} of {world().size} "
            raise EkeError(
                f"{where}ran out of memory on a single sample of {shortage.tokens} tokens: "
                f"{shortage.error}",
                rule="micro-batches cannot be made smaller than a sample",
                fix="Set data.max_length lower (data.overlength to truncate or skip), or use a "
                "smaller model or a machine with more memory",
            )
    least = min(shortage.tokens for shortage in shortages.values())
    return max(2, min(cap - 1, int(SHARE * least)))


def shortages_of(told: Sequence[Any]) -> dict[int, Shortage]:
    """By rank, of what every rank told: a shortage as JSON, or None."""
    return {rank: Shortage(*one) for rank, one in enumerate(told) if one is not None}


def recover(
    session: Session, loader: DynamicLoader, shortages: Mapping[int, Shortage], flops: float
) -> None:
    """Take the block back into the loader and lower its cap. A collective.

    Args:
        flops: the most that the block can have taken.

    Raises:
        EkeError: a single sample did not fit.
    """
    before = loader.micro_tokens
    session.charge("lost", flops)
    after = lowered_cap(before, shortages)
    loader.lower_cap(after)
    _tell(session, shortages, before, after, "step")


def recover_evaluation(session: Session, shortages: Mapping[int, Shortage], flops: float) -> None:
    """Lower the cap of evaluations. A collective.

    Args:
        flops: the most that what was begun can have taken.

    Raises:
        EkeError: a single sample did not fit.
    """
    holdout = session.prepared.holdout
    before = holdout.micro_tokens
    session.charge("lost", flops)
    after = lowered_cap(before, shortages)
    holdout.limit(after)
    session.state.eval_micro_tokens = after
    _tell(session, shortages, before, after, "evaluation")


def _tell(
    session: Session, shortages: Mapping[int, Shortage], before: int, after: int, during: str
) -> None:
    if session.config.run.device == "cuda":
        torch.cuda.empty_cache()
    rank, shortage = min(shortages.items())
    record = {
        "during": during,
        "step": session.state.step,
        "rank": rank,
        "tokens": shortage.tokens,
        "samples": shortage.samples,
        "before": before,
        "after": after,
        "error": shortage.error,
    }
    if world().is_main:
        session.run.ledger.note("out_of_memory", **record)
    session.log("metrics", {"kind": "out_of_memory", **record})
    what = "micro-batches" if during == "step" else "batches of evaluations"
    session.say(
        f"out of memory on rank {rank} with {shortage.tokens:,} tokens: {what} hold at most "
        f"{after:,} from here on"
    )
