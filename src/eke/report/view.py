"""What a report says of a run, as frozen dataclasses.

Property: nothing here is invented. What the records do not say is `None` or an empty tuple, and
is shown as unknown or left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from eke.report.accounting import Accounts
from eke.report.batches import Batching
from eke.report.saves import Saves

LOSS_UNITS = {
    "token": "nats per token",
    "sample": "nats per token, samples weighing alike",
    "sequence": "nats per sample",
}


@dataclass(frozen=True)
class StepPoint:
    """One optimizer step that stands. `x` is its place on the run's axis (see `RunView.x_unit`)."""

    step: int
    x: float
    loss: float | None
    phase: str
    padding: float | None
    tokens_per_s: float | None
    tokens_total: float | None


@dataclass(frozen=True)
class EvalPoint:
    """One held-out evaluation that stands; its unit is the run's `loss_unit`."""

    step: int
    x: float
    loss: float | None
    se: float | None
    examples: int | None
    finished: bool


@dataclass(frozen=True)
class DecisionRow:
    """One of the governor's decisions, with its evidence as text."""

    step: int | None
    x: float
    action: str
    reason: str
    evidence: tuple[tuple[str, str], ...]
    alternatives: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Restart:
    """Where a run went on after it had ended or been killed."""

    step: int
    x: float
    undone_steps: int
    t: float | None


@dataclass(frozen=True)
class Phase:
    """A stretch of steps in one phase of the schedule, as `[start, end]` on the run's axis."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Limit:
    """A limit of the budget and what of it was used; `used` None means unknown."""

    unit: str
    label: str
    total: float
    used: float | None
    is_exact: bool = True

    @property
    def share(self) -> float | None:
        """The share used, above 1 if the limit was passed."""
        return None if self.used is None else self.used / self.total


@dataclass(frozen=True)
class Lengths:
    """How long the training samples were: bins of equal width up to `cap` tokens."""

    counts: tuple[float, ...]
    cap: float
    steps: int
    left_out: int

    @property
    def samples(self) -> float:
        """All samples that were counted."""
        return sum(self.counts)


@dataclass(frozen=True)
class Proof:
    """A killed and resumed run held against one that was not."""

    steps: tuple[int, ...]
    reference: tuple[float | None, ...]
    resumed: tuple[float | None, ...]
    bit_identical: bool | None
    killed_at: int | None
    resumed_from: int | None
    what: str

    @property
    def largest_difference(self) -> float | None:
        """The largest absolute difference of the two losses; None where none can be taken."""
        pairs = zip(self.reference, self.resumed, strict=True)
        differences = [abs(a - b) for a, b in pairs if a is not None and b is not None]
        return max(differences, default=None)


@dataclass(frozen=True)
class RunView:
    """Everything that a report shows of a run.

    Attributes:
        x_unit: "flops", or "step" for records without FLOPs.
        budget_end_x: where on the axis the budget ends, at the rate of the run; None if unknown.
        last_losses, weights: per held-out example, for pairing with another run.
        saves: None if the trace holds no save that ended.
        cadence: how often the run came to save by itself, and why; "" where it was told.
        batching: what ranks' steps were made of; None if no step says so.
        loss_of: what losses are the mean of: "token", "sample" or "sequence".
    """

    name: str
    state: str
    reason: str
    exit_code: int | None
    model: str
    corpus: str
    eval_corpus: str
    currency: str
    x_unit: str
    steps: tuple[StepPoint, ...]
    undone: tuple[StepPoint, ...]
    evals: tuple[EvalPoint, ...]
    decisions: tuple[DecisionRow, ...]
    restarts: tuple[Restart, ...]
    phases: tuple[Phase, ...]
    limits: tuple[Limit, ...]
    budget_used: float | None
    budget_end_x: float | None
    accounts: Accounts
    lengths: Lengths | None
    proof: Proof | None
    began: float | None
    ended: float | None
    config: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    plan: tuple[tuple[str, str], ...]
    last_losses: tuple[float | None, ...] = ()
    weights: tuple[float | None, ...] = ()
    notices: tuple[str, ...] = ()
    saves: Saves | None = None
    cadence: str = ""
    loss_of: str = "token"
    batching: Batching | None = None

    @property
    def loss_unit(self) -> str:
        """What a loss is counted in."""
        return LOSS_UNITS.get(self.loss_of, LOSS_UNITS["token"])

    @property
    def final(self) -> EvalPoint | None:
        """The evaluation that counts: of the finished model, else the last with a number."""
        usable = [e for e in self.evals if e.loss is not None]
        return next((e for e in reversed(usable) if e.finished), usable[-1] if usable else None)

    @property
    def last_step(self) -> int:
        """The number of the last step that stands; 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    @property
    def bad_losses(self) -> int:
        """Steps whose loss was not a number."""
        return sum(s.loss is None for s in self.steps)
