"""What a loader tells of its work: counts, shares of waste, and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from eke.batching.state import Counts


@dataclass
class LoaderStats:
    """What the loader did since it was built; `counts` and `blocks` go on over a resume.

    Tokens and samples are of all ranks; `micro_batches`, `dummies` and seconds are this rank's. A
    block that `lower_cap` took back is in none.

    Attributes:
        padded_tokens: real tokens, padding and dummies.
        paced_tokens: padded tokens if every rank had the slowest rank's of each micro-step.
        capacity_tokens: what all micro-batches could have held.
        fetch_s, exchange_s, plan_s: of making rounds, partly while others trained: waiting for
            samples, for other ranks, and planning.
        wait_s: how long training waited for a round.
    """

    blocks: int = 0
    rounds: int = 0
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    paced_tokens: int = 0
    capacity_tokens: int = 0
    micro_batches: int = 0
    dummies: int = 0
    fetch_s: float = 0.0
    exchange_s: float = 0.0
    plan_s: float = 0.0
    wait_s: float = 0.0
    counts: Counts = field(default_factory=Counts)

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is not real, in [0, 1]."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def efficiency(self) -> float:
        """Real tokens over `paced_tokens`: 1 without padding and with balanced ranks."""
        return self.tokens / self.paced_tokens if self.paced_tokens else 1.0

    @property
    def fill(self) -> float:
        """Real tokens over `capacity_tokens`."""
        return self.tokens / self.capacity_tokens if self.capacity_tokens else 1.0
