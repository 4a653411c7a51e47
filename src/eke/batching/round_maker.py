"""Makes rounds: fetches this rank's share of a window, hears the others' sizes, plans them all.

Everything that a round costs happens here, so that it can happen ahead, in a thread, while the
round before it trains. A round depends on where it starts and on nothing else.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from eke.batching.batch import Tokens
from eke.batching.exchange import Exchange
from eke.batching.fetch import ABSENT, SampleFetcher
from eke.batching.order import AnyOrder, Place
from eke.batching.parcel import opened, parcel
from eke.batching.planner import BlockPlan, Rules, Sample, plan_round
from eke.batching.rounds import Offer, conclude, read
from eke.batching.state import Counts, Progress
from eke.batching.triage import Overlength, Triage
from eke.errors import EkeError, InputError

Waiting = tuple[tuple[int, ...], ...]
"""Of each rank, the indices of the samples that wait for the next round; empty for none at all."""


@dataclass
class Round:
    """A round as all ranks planned it, with what this rank needs for its part.

    Attributes:
        progress: where the loader stands before the round's first block.
        after, waiting: where the next round begins.
        plans: the blocks that are still to be delivered.
        samples: this rank's samples by index.
        empty, skipped: how many samples of all ranks were dropped for it.
        overlong: those of all ranks that were cut, or get a micro-batch of their own.
        arrival: of each sample of all ranks, by index, how many come before it: what waited, then
            the order of the epoch.
        stop: why all ranks stop here, instead of training on this round; "" if they do not.
    """

    progress: Progress
    after: Place
    waiting: Waiting
    plans: list[BlockPlan]
    samples: dict[int, Tokens]
    overlong: set[int]
    arrival: dict[int, int] = field(default_factory=dict)
    empty: int = 0
    skipped: int = 0
    stop: str = ""
    fetch_s: float = 0.0
    exchange_s: float = 0.0
    plan_s: float = 0.0

    def counted(self, counts: Counts) -> Counts:
        """The counts with what this round dropped."""
        return replace(
            counts, empty=counts.empty + self.empty, skipped=counts.skipped + self.skipped
        )


@dataclass(frozen=True)
class RoundMaker:
    """What rounds are made of; the same on every rank, but for the exchange and the fetcher.

    Attributes:
        config: the settings that a state is bound to.
        manner: those that a state is not bound to, but that must not differ over ranks either.
    """

    exchange: Exchange
    fetcher: SampleFetcher
    order: AnyOrder
    rules: Rules
    overlength: Overlength
    round_samples: int
    config: dict[str, Any]
    manner: dict[str, Any]

    def make(self, start: Progress, kept: dict[int, Tokens], stop: str = "") -> Round:
        """The round at `start`, less what of it is delivered. A collective.

        Args:
            kept: samples that this rank fetched for the round before, and that wait or are pending.
            stop: why this rank wishes to stop before it.

        Raises:
            InputError: a sample is malformed or, under `overlength="error"`, too long; the ranks'
                loaders differ; no sample of an epoch is usable.
            EkeError: fetching failed on some rank, or one is gone; it is named, on all ranks.
        """
        rank, size = self.exchange.rank, self.exchange.size
        made = Round(start, start.place, (), [], {}, set())
        rules = replace(self.rules, micro_tokens=start.micro_tokens)
        waiting = start.waiting or ((),) * size
        shares: list[list[Sample]] = [[] for _ in range(size)]
        allowed = self.rules.micro_tokens
        triage = Triage(start.micro_tokens, self.overlength, shares, allowed=allowed)
        taken: list[int] = []
        absent: list[int] = []
        first, waited, known = True, [0] * size, start.place
        while first or triage.filled(rules.per_step) < rules.per_step.amount:
            if not first and self.order.is_exhausted(known):
                break
            # Not from `known`: so all that the round takes is one window from where it starts.
            fresh, made.after = self.order.window(made.after, self.round_samples)
            taken += fresh
            dealt = self.order.deal(fresh, size)
            asked = [[*(waiting[r] if first else ()), *dealt[r]] for r in range(size)]
            made.stop, sizes = self._hear(asked[rank], kept, start, made, stop)
            if made.stop:
                return made
            for row in zip_longest(*map(_samples, asked, sizes)):
                for owner, sample in enumerate(row):
                    if sample is not None and sample.length == ABSENT:
                        absent.append(sample.index)
                    elif sample is not None:
                        triage.add(owner, sample)
            gone = set(absent)
            known = self.order.ended(made.after, gone, (i for i in taken if i not in gone))
            if first:
                old = [set(one) for one in waiting]
                waited = [
                    sum(sample.index in one for sample in share)
                    for share, one in zip(triage.shares, old, strict=True)
                ]
            first = False
        made.arrival = {index: n for n, index in enumerate([*chain(*waiting), *taken])}
        began = time.perf_counter()
        made.after, last = known, self.order.is_exhausted(known)
        seed = _seed(self.config["seed"], start)
        if self.order.shuffles_rounds:
            for share, old_ones in zip(triage.shares, waited, strict=True):
                fresh_ones = share[old_ones:]
                random.Random(f"{seed}/{len(fresh_ones)}").shuffle(fresh_ones)
                share[old_ones:] = fresh_ones
        planned = plan_round(triage.shares, rules, rng_seed=seed, waited=waited, last=last)
        made.plan_s = time.perf_counter() - began
        self._settle(made, planned.blocks, planned.waiting, triage, taken, last)
        self._move(made, triage.shares)
        return made

    def _hear(
        self,
        mine: list[int],
        kept: dict[int, Tokens],
        start: Progress,
        made: Round,
        stop: str,
    ) -> tuple[str, list[Any]]:
        """Fetch this rank's samples, and get what all ranks say: why they stop, and their sizes."""
        standing = {**self.config, **self.manner, "position": start.position()}
        standing["micro_tokens"] = start.micro_tokens
        began = time.perf_counter()
        offer, fault, begins = Offer(standing, stop=stop), None, ""
        if not stop:
            try:
                epoch = start.place.epoch
                wanted = [index for index in mine if index not in kept]
                begins = self.fetcher.begins(epoch, wanted)
                if begins and start.begins not in ("", begins):
                    raise InputError(
                        "the dataset begins with another sample than it did before in this epoch",
                        rule="an iterable gives the same samples in one order whenever and "
                        "wherever it is iterated for an epoch",
                        fix="Take its order, and all that is random in it, from a seed and the "
                        "epoch, and resume with the data of the saved run",
                    )
                fetched = dict(zip(wanted, self.fetcher.take(wanted, epoch), strict=True))
            except EkeError as error:
                offer = Offer(standing, fault=str(error), input_fault=isinstance(error, InputError))
                fault = error
            else:
                fetched |= {i: kept[i] for i in mine if i in kept}
                if self.overlength == "truncate":
                    fetched = {i: t.cut(start.micro_tokens) for i, t in fetched.items()}
                made.samples |= fetched
                sizes = _sizes([made.samples[i] for i in mine])
                offer = Offer(standing, sizes, begins=begins)
        middle = time.perf_counter()
        offers = [read(data) for data in self.exchange.gather(offer.data())]
        made.fetch_s += middle - began
        made.exchange_s += time.perf_counter() - middle
        if fault is not None and self.exchange.size == 1:
            raise fault
        stops = conclude(offers)
        begun = next((one.begins for one in offers if one.begins), made.progress.begins)
        made.progress = replace(made.progress, begins=begun)
        return stops, [one.sizes for one in offers]

    def _settle(
        self,
        made: Round,
        plans: list[BlockPlan],
        waiting: list[list[Sample]],
        triage: Triage,
        taken: list[int],
        last: bool,
    ) -> None:
        """Where the round leaves off, and what of it is still to be delivered."""
        start, per_step = made.progress, self.rules.per_step
        if last:
            made.after = Place(made.after.epoch + 1)
        elif per_step.unit == "samples" and len(plans[-1].samples()) < per_step.amount:
            # Dropped samples left the last step short: its samples open the next round.
            short = set(plans.pop().indices())
            rest = tuple(index for index in taken if index in short)
            made.after = replace(made.after, pending=rest + made.after.pending)
        if not plans and not any(waiting) and start.place == Place(start.place.epoch):
            if not triage.empty and not triage.skipped:
                raise InputError(
                    f"the dataset gave no samples in epoch {start.place.epoch}",
                    rule="it begins again each time that it is iterated",
                    fix="Check its files and filters, and that __iter__ makes a new iterator",
                )
            raise InputError(
                f"no sample of the dataset is usable: {len(triage.empty)} have no tokens, "
                f"{len(triage.skipped)} are longer than micro_tokens = {start.micro_tokens}",
                fix="Check the data, raise micro_tokens, or set overlength to 'truncate'",
            )
        made.waiting = tuple(tuple(sample.index for sample in one) for one in waiting)
        if not start.taken:  # else they were counted when the round was begun
            made.empty, made.skipped = len(triage.empty), len(triage.skipped)
        dropped = (*triage.empty, *triage.skipped)
        made.progress = replace(start, taken=len(taken), dropped=dropped)
        made.overlong = triage.overlong
        made.plans = undelivered(plans, start.delivered)

    def _move(self, made: Round, shares: Sequence[Sequence[Sample]]) -> None:
        """Bring samples to the ranks that the plan gives them to, and let the others go."""
        rank, size = self.exchange.rank, self.exchange.size
        home = {sample.index: r for r, share in enumerate(shares) for sample in share}
        placed: dict[int, int] = {}
        for plan in made.plans:
            for step in plan.steps:
                for r, group in enumerate(step):
                    placed |= dict.fromkeys((sample.index for sample in group), r)
        if any(home[index] != r for index, r in placed.items()):
            mine = [(i, r) for i, r in placed.items() if home[i] == rank != r]
            outgoing = [
                parcel([(i, made.samples[i]) for i, r in mine if r == to]) for to in range(size)
            ]
            began = time.perf_counter()
            made.samples |= opened(self.exchange.swap(outgoing))
            made.exchange_s += time.perf_counter() - began
        keep = {index for index, r in placed.items() if r == rank}
        if made.waiting:
            keep |= set(made.waiting[rank])
        # An iterable would be read again from its beginning to come by them.
        keep |= set(made.after.pending)
        made.samples = {i: tokens for i, tokens in made.samples.items() if i in keep}


def _sizes(samples: Sequence[Tokens]) -> Any:
    rows = [(t.full_length, t.label_tokens, *t.loads) for t in samples]
    return np.array(rows, dtype=np.int64) if rows else np.zeros((0, 2), dtype=np.int64)


def _samples(indices: Sequence[int], sizes: Any) -> list[Sample]:
    return [
        Sample(index, length, label_tokens, tuple(loads))
        for index, (length, label_tokens, *loads) in zip(indices, sizes.tolist(), strict=True)
    ]


def _seed(seed: int, start: Progress) -> int:
    place = start.place
    name = f"{seed}/{place.epoch}/{place.cursor}/{len(place.pending)}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def undelivered(plans: list[BlockPlan], delivered: Sequence[int]) -> list[BlockPlan]:
    """What is left of a round's plan after the samples at its front that were delivered.

    Raises:
        EkeError: the plan does not begin with them, so the dataset gives other samples now.
    """
    queue, left = list(plans), tuple(delivered)
    while left:
        plan = queue.pop(0) if queue else None
        if plan is not None and len(plan.samples()) > len(left):
            plan, rest = plan.first_step()
            queue.insert(0, rest)
        indices = tuple(plan.indices()) if plan is not None else ()
        if not indices or indices != left[: len(indices)]:
            raise EkeError(
                "the dataset no longer gives the samples that the loader's state was saved with",
                rule="item i must be the same whenever it is asked for",
                fix="Resume with the data and the pipeline of the saved run, or start a new run",
            )
        left = left[len(indices) :]
    return queue
