"""What a run must remember besides tensors: counters, the decay, the governor, log positions.

Everything here is JSON and is saved with each checkpoint, so that a run that is killed goes on
as if it had not been.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from eke.training.schedule import Decay


@dataclass
class RunState:
    """Counters of the trajectory that leads to the current weights.

    Attributes:
        step: optimizer steps, skipped ones included.
        samples, tokens: what the model has learned from; real tokens, all ranks together.
        dropped: samples that the loader passed over as empty or too long.
        longest: tokens of the longest sample met so far, those looked at beforehand included.
        flops: what the trajectory cost, training, padding and evaluation; all ranks together.
        next_eval: the step at which the next evaluation is due.
        eval_interval: steps between evaluations; 0 until it is known.
        lr_scale: halved when a step was not finite.
        bad_steps: how often that has happened.
        best_step, best_loss: the best evaluation so far that has a checkpoint.
        limits: those of the budget when this was saved; empty in the first releases' checkpoints.
        eval_micro_tokens: the cap on an evaluation's batches, where it was lowered; else 0.
        rolled_back_to: the step whose weights the governor went back to; None when it did not.
    """

    step: int = 0
    samples: int = 0
    dropped: int = 0
    tokens: int = 0
    longest: int = 0
    flops: float = 0.0
    next_eval: int = 0
    eval_interval: int = 0
    lr_scale: float = 1.0
    bad_steps: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    rolled_back_to: int | None = None
    decay: Decay | None = None
    corpus: str = ""
    governor: dict[str, Any] | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    eval_micro_tokens: int = 0

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "decay"}
        state["decay"] = None if self.decay is None else self.decay.to_json()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, in place."""
        for f in fields(self):
            if f.name in state:
                setattr(self, f.name, state[f.name])
        decay = state.get("decay")
        self.decay = None if decay is None else Decay.from_json(decay)
