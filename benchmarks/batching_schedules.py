"""What each arm would train on: schedules of micro-batches made of lengths, and their figures.

A schedule is a list of micro-steps; a micro-step has one group of lengths for each rank, empty for
a dummy. No tensors, no processes and no clock: the figures are exact. All of this is pure.

Figures, W ranks, cap L:

    efficiency = real tokens / (W * sum over micro-steps of the largest rank's occupied tokens)
    charged    = the same with 256 tokens more for every micro-step: what a micro-batch costs
                 however small it is, as `CostModel` has it by default
    padding    = 1 - real tokens / occupied tokens
    fill       = real tokens / (W * micro-steps * L)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eke.batching.cost import CostModel
from eke.batching.order import Order, Place
from eke.batching.planner import DUMMY_TOKENS, PerStep, Rules, Sample, plan_round

Step = list[list[int]]
"""The lengths of each rank's micro-batch."""

CHARGE = round(CostModel().per_micro_batch)
"""Tokens that a micro-batch costs besides its own."""


@dataclass(frozen=True)
class Schedule:
    """An epoch.

    Attributes:
        whole: samples that are whole in it, where an arm cuts samples; None if it cuts none.
    """

    steps: list[Step]
    packed: bool = False
    whole: int | None = None


UNITS = {
    "efficiency": "share",
    "charged": "share",
    "padding": "share",
    "fill": "share",
    "steps": "micro-steps",
    "dummies": "share of micro-batches",
    "lost": "samples",
    "over": "micro-batches above the cap",
}


def figures(schedule: Schedule, lengths: Sequence[int], cap: int) -> dict[str, float]:
    """Every figure of `UNITS`.

    `lost` counts samples that are not in the schedule once and whole (those that are in it twice
    are taken off, so it can be negative); `over` counts micro-batches of several samples only.
    """
    real = occupied = paced = dummies = seen = over = 0
    ranks = len(schedule.steps[0]) if schedule.steps else 1
    for step in schedule.steps:
        slowest = 0
        for group in step:
            total = sum(group)
            tokens = total if schedule.packed else len(group) * max(group, default=0)
            if not group:
                dummies += 1
                tokens = DUMMY_TOKENS
            real += total
            occupied += tokens
            over += len(group) > 1 and tokens > cap
            seen += len(group)
            slowest = max(slowest, tokens)
        paced += slowest * ranks
    batches = len(schedule.steps) * ranks
    whole = seen if schedule.whole is None else schedule.whole
    return {
        "efficiency": real / max(1, paced),
        "charged": real / max(1, paced + CHARGE * batches),
        "padding": 1 - real / max(1, occupied),
        "fill": real / max(1, batches * cap),
        "steps": float(len(schedule.steps)),
        "dummies": dummies / max(1, batches),
        "lost": float(len(lengths) - whole),
        "over": float(over),
    }


def bound(lengths: Sequence[int], ranks: int, window: int, seed: int) -> float:
    """No scheme that drains its windows and leaves samples on their ranks can be more efficient.

    Real tokens over W times the sum over windows of the largest rank's.
    """
    paced = 0
    for shares in _windows(lengths, ranks, window, seed):
        paced += ranks * max(sum(share) for share in shares)
    return sum(lengths) / paced


def _windows(
    lengths: Sequence[int], ranks: int, window: int, seed: int
) -> Iterable[list[list[int]]]:
    order, place = Order(len(lengths), seed, shuffle=True), Place()
    while not order.is_exhausted(place):
        fresh, place = order.window(place, window * ranks)
        yield [[lengths[i] for i in fresh[rank::ranks]] for rank in range(ranks)]


# ---------------------------------------------------------------------- eke


def eke(
    lengths: Sequence[int],
    cap: int,
    ranks: int,
    window: int,
    *,
    per_step: PerStep | None = None,
    packed: bool = False,
    wait_rounds: int = 0,
    move: bool = True,
    charge: int = CHARGE,
    seed: int = 0,
) -> Schedule:
    """The rounds of an epoch as the loader makes them, by the loader's own planner.

    Args:
        per_step: by default tokens, about one micro-batch of every rank.
        move: whether samples move between ranks.
        charge: tokens that the planner takes a micro-batch to cost besides its own.
    """
    per_step = per_step or PerStep("tokens", ranks * cap)
    cost = CostModel(per_micro_batch=float(charge))
    rules = Rules(cap, per_step, cost, packed=packed, wait_rounds=wait_rounds, move=move)
    order, place = Order(len(lengths), seed, shuffle=True), Place()
    round_samples = window * ranks
    if per_step.unit == "samples":
        round_samples = max(1, round_samples // per_step.amount) * per_step.amount
    waiting: list[list[Sample]] = [[] for _ in range(ranks)]
    steps: list[Step] = []
    number = 0
    while not order.is_exhausted(place):
        fresh, place = order.window(place, round_samples)
        waited = [len(one) for one in waiting]
        shares = [
            [*waiting[rank], *(Sample(i, lengths[i], lengths[i]) for i in fresh[rank::ranks])]
            for rank in range(ranks)
        ]
        last = order.is_exhausted(place)
        planned = plan_round(
            shares, rules, rng_seed=seed * 1_000_003 + number, waited=waited, last=last
        )
        waiting, number = planned.waiting, number + 1
        for block in planned.blocks:
            steps += [[[s.length for s in group] for group in step] for step in block.steps]
    return Schedule(steps, packed)


# ---------------------------------------------------------------------- without a look-ahead


def fixed(lengths: Sequence[int], ranks: int, size: int, seed: int) -> Schedule:
    """A plain DataLoader: so many samples a rank, in a random order."""
    return Schedule(dealt(in_batches(shuffled(lengths, seed), size), ranks))


_FEW = 4096
"""Samples up to which the planner makes one step of an epoch in seconds."""


def oracle(lengths: Sequence[int], cap: int, ranks: int) -> Schedule:
    """All lengths known beforehand: micro-batches are cut from the whole epoch as they fit best. No
    order is left to chance, and no rank has samples of its own.

    Cut for one rank and dealt costliest first; of few samples also for all ranks as one step, and
    the more efficient of the two is taken.
    """
    every = PerStep("tokens", sum(lengths))
    alone = eke(lengths, cap, 1, len(lengths), per_step=every, move=False)
    groups = [group for step in alone.steps for group in step]
    found = [Schedule(dealt(sorted(groups, key=lambda g: -len(g) * max(g)), ranks))]
    if len(lengths) <= _FEW:
        together = PerStep("samples", len(lengths))
        found.append(eke(lengths, cap, ranks, len(lengths), per_step=together))
    return max(found, key=lambda one: figures(one, lengths, cap)["efficiency"])


def shuffled(lengths: Sequence[int], seed: int) -> list[int]:
    """In the order in which eke takes them, for all arms that leave the order to chance."""
    order = Order(len(lengths), seed, shuffle=True)
    return [lengths[i] for i in order.window(Place(), len(lengths))[0]]


def in_batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """In order, so many at a time."""
    return [list(lengths[at : at + size]) for at in range(0, len(lengths), size)]


def dealt(groups: Sequence[list[int]], ranks: int) -> list[Step]:
    """Group n goes to rank n modulo the ranks; the last micro-step is filled up with dummies."""
    steps = [list(groups[at : at + ranks]) for at in range(0, len(groups), ranks)]
    if steps:
        steps[-1] += [[] for _ in range(ranks - len(steps[-1]))]
    return steps
