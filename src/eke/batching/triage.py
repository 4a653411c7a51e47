"""What becomes of each sample before planning: used, cut, alone, dropped, or an error. Pure.

Property: every sample that is added is in exactly one of `shares`, `empty` and `skipped`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from eke.batching.planner import PerStep, Sample
from eke.errors import InputError

Overlength = Literal["error", "truncate", "skip", "solo"]


@dataclass
class Triage:
    """The samples of a round; `shares[r]` holds the usable ones of rank r.

    `overlong` are the usable ones of more than `micro_tokens` tokens, cut or not. Of a cap that was
    lowered, `allowed` is what it was: up to there a sample is no error, but gets a micro-batch of
    its own.
    """

    micro_tokens: int
    overlength: Overlength
    shares: list[list[Sample]]
    empty: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    overlong: set[int] = field(default_factory=set)
    allowed: int = 0

    def add(self, rank: int, sample: Sample) -> None:
        """Decide about a sample; its length is that before truncation.

        Raises:
            InputError: it is too long, and the policy is `error`.
        """
        if sample.length == 0:
            self.empty.append(sample.index)
            return
        if sample.length > self.micro_tokens:
            if self.overlength == "error" and sample.length > self.allowed:
                raise InputError(
                    f"sample {sample.index} does not fit in a micro-batch",
                    value=f"{sample.length} tokens",
                    rule=f"a micro-batch holds at most micro_tokens = {self.micro_tokens}",
                    fix=f"Set micro_tokens to at least {sample.length}, or overlength to "
                    "'truncate', 'skip' or 'solo'",
                )
            if self.overlength == "skip":
                self.skipped.append(sample.index)
                return
            self.overlong.add(sample.index)
            if self.overlength == "truncate":
                sample = replace(sample, length=self.micro_tokens)
        self.shares[rank].append(sample)

    def filled(self, per_step: PerStep) -> int:
        """How much there is to plan, in the unit of `per_step`."""
        if per_step.unit == "samples":
            return sum(map(len, self.shares))
        return sum(sample.length for share in self.shares for sample in share)
