"""The loader: each rank fetches its share of a window, all plan it alike, each trains its part.

One round: every rank fetches its share of the next window, the ranks exchange lengths and label
counts (whole numbers, once a window), every rank computes the same plan for all, and samples go to
the ranks that the plan gives them to. With workers, the next round is made in a thread while this
one trains.

Properties: every rank gets the same number of blocks and of micro-batches; every sample that is
not dropped by a stated policy is delivered exactly once an epoch; a loader that loads a state
goes on where the saved one stood, with the same blocks on as many ranks, and with the samples
that were left on any other number; what fails on one rank is raised on all, in the same round.
"""

from __future__ import annotations

import atexit
import multiprocessing
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Any, get_args

import torch

from eke.batching.ahead import Ahead
from eke.batching.arguments import flag, one_of, seconds, whole_number
from eke.batching.batch import Block, Loss, MicroBatch, Tokens
from eke.batching.batch import collate as collate_tokens
from eke.batching.cost import CostModel
from eke.batching.exchange import Exchange, exchange_of_job
from eke.batching.extra import Collate, with_extra
from eke.batching.fetch import SampleFetcher
from eke.batching.order import Place
from eke.batching.planner import BlockPlan, Group, PerStep, Rules
from eke.batching.round_maker import Round, RoundMaker
from eke.batching.source import SampleDataset, source_of
from eke.batching.state import Counts, Progress, progress_of
from eke.batching.stats import LoaderStats
from eke.batching.tally import tally
from eke.batching.triage import Overlength
from eke.errors import EkeError, InputError
from eke.version import __version__

CLOSE_S = 10.0
"""How long `close` waits for workers in the middle of a sample before it ends them."""


class DynamicLoader:
    """Forms micro-batches under a hard cap on their tokens, aligned over ranks.

    With several ranks, building, iterating, `load_state_dict` and `lower_cap` are collectives,
    called on all ranks in the same order; `stop` and `close` are not.

    Args:
        dataset: map-style or iterable, the whole dataset on every rank; an item is a mapping with
            `input_ids` and `labels` (integers [T]), and always the same for the same index, or
            place in an epoch. Of an iterable `num_shards` with `shard`, `skip` and `set_epoch` are
            used if it has them. Its `fingerprint`, if it is a string, must agree when a state is
            loaded. Items of no tokens are dropped and counted.
        micro_tokens: most tokens of one micro-batch, padding included.
        per_step: what an optimizer step consumes over all ranks: `tokens:N` (about N) or
            `samples:N` (exactly N, but for the last step of an epoch).
        window: samples that each rank looks ahead. A round takes more windows if one is less
            than a step.
        overlength: what becomes of a sample of more than `micro_tokens` tokens: `error` ends all
            ranks, `truncate` keeps its first tokens, `skip` drops it, `solo` gives it a
            micro-batch of its own; each counted in `stats.counts`.
        shuffle: a new order each epoch, from `seed`; else the dataset's order. Of an iterable the
            samples of a round, a window on every rank, change places; nothing comes from further.
        epochs: end after so many epochs; `None` never ends.
        packing: micro-batches without padding, samples end to end in one row.
        wait_rounds: how many rounds a sample may wait for one that it fills better, 0 or 1; only
            where `per_step` counts tokens.
        move_samples: whether samples go to the ranks that balance their step. False, where they
            are too large to send: ranks then wait for one another as long as their own samples
            make them. Where `per_step` counts samples, a step of samples that move is exactly the
            next so many of the epoch; else each rank gives its equal part of every step from all
            its samples of the round, so the order inside a round is not the epoch's, and steps
            are more alike in their lengths.
        cost: how long a micro-batch takes, and what else than tokens is capped.
        loss: what the loss of a step is the mean of: `token`, its label tokens; `sample`, its
            samples' mean token losses; `sequence`, its samples' summed token losses.
        collate: `collate(samples, shape)`, a function from the samples of a micro-batch, as the
            dataset gave them, and its `Shape` to further tensors by name, which the micro-batch has
            too. Samples then never move to another rank: counting in samples, a step has an equal
            part of each rank's, of its whole round, instead of the next ones of the epoch.
        pin_memory: micro-batches are in pinned memory where there is CUDA; not yet run on hardware.
        patience: how long a rank may keep the others waiting, "10m" for example.
        exchange: how to reach the other ranks; by default those of the torch.distributed job.

    Raises:
        InputError: an argument is out of its range, or the ranks cannot be reached.
    """

    def __init__(
        self,
        dataset: SampleDataset | Iterable[Any],
        *,
        micro_tokens: int,
        per_step: str,
        window: int = 1024,
        num_workers: int = 0,
        seed: int = 0,
        pad_token_id: int = 0,
        overlength: Overlength = "error",
        shuffle: bool = True,
        start_method: str | None = None,
        epochs: int | None = None,
        packing: bool = False,
        wait_rounds: int = 1,
        move_samples: bool = True,
        cost: CostModel | None = None,
        loss: Loss = "token",
        collate: Collate | None = None,
        pin_memory: bool = False,
        patience: float | str = "10m",
        exchange: Exchange | None = None,
    ) -> None:
        micro_tokens = whole_number("micro_tokens", micro_tokens, 2)
        window = whole_number("window", window, 1)
        num_workers = whole_number("num_workers", num_workers, 0)
        seed = whole_number("seed", seed, 0, most=None)
        pad_token_id = whole_number("pad_token_id", pad_token_id, 0)
        epochs = None if epochs is None else whole_number("epochs", epochs, 0)
        shuffle, packing = flag("shuffle", shuffle), flag("packing", packing)
        move_samples = flag("move_samples", move_samples)
        one_of("overlength is not a known policy", overlength, get_args(Overlength))
        one_of("loss is not a known mean", loss, get_args(Loss))
        wait_rounds = whole_number("wait_rounds", wait_rounds, 0, most=1)
        methods = multiprocessing.get_all_start_methods()
        one_of("start_method is not one of this system's", start_method, (None, *methods))
        if not isinstance(cost, CostModel | None):
            raise InputError("cost is not a CostModel", value=cost, fix="Give an eke.CostModel")
        if not isinstance(exchange, Exchange | None):
            raise InputError("exchange is not an Exchange", value=type(exchange).__name__)
        patience_s = seconds("the loader's patience", patience)
        if collate is not None and not callable(collate):
            raise InputError("collate is not a function", value=collate)
        step = PerStep.parse(per_step)
        cost = cost or CostModel()
        moved = move_samples and collate is None  # whole samples are not sent
        pin_memory = flag("pin_memory", pin_memory)
        rules = Rules(micro_tokens, step, cost, packing, wait_rounds, moved)
        source = source_of(dataset)
        fingerprint = getattr(dataset, "fingerprint", None)
        self._config: dict[str, Any] = {
            "dataset_length": source.samples,
            "dataset_parts": source.parts,
            "dataset_fingerprint": fingerprint if isinstance(fingerprint, str) else None,
            "micro_tokens": micro_tokens,
            "per_step": per_step,
            "window": window,
            "seed": seed,
            "overlength": overlength,
            "shuffle": shuffle,
        }
        self._config |= {"packing": packing, "wait_rounds": wait_rounds}
        self._config["move_samples"] = move_samples
        self._config["loss"] = self._loss = loss
        self._config["collate"] = None if collate is None else "own"
        self._collate = collate
        self._pins = pin_memory and torch.cuda.is_available()
        self._micro_tokens, self._overlength = micro_tokens, overlength
        self._pad_token_id, self._epochs = pad_token_id, epochs
        self._exchange = exchange_of_job(patience_s) if exchange is None else exchange
        self._rank, self._size = self._exchange.rank, self._exchange.size
        self._order = source.order(seed, shuffle)
        round_samples = window * self._size
        if rules.per_step.unit == "samples":
            # Whole steps, so that a round leaves nothing over unless it drops samples.
            n = rules.per_step.amount
            round_samples = max(1, round_samples // n) * n
        self._fetcher = SampleFetcher(
            source,
            limit=micro_tokens if overlength == "truncate" else None,
            most=-(-round_samples // self._size),
            num_workers=num_workers,
            start_method=start_method,
            cost=rules.cost,
            ranks=self._size,
            keep_items=collate is not None,
        )
        workers = "some" if num_workers else "none"
        self._planner = f"{__version__} {rules.cost.name()}"
        manner = {"epochs": epochs, "num_workers": workers, "planner": self._planner}
        self._maker = RoundMaker(
            self._exchange,
            self._fetcher,
            self._order,
            rules,
            overlength,
            round_samples,
            self._config,
            manner,
        )
        self._stats = LoaderStats()
        self._closed = False
        self._wish = self.stopped = ""
        self._ahead: Ahead[Round] | None = None
        self._thread_ahead = num_workers > 0
        self._go_to(Progress(Place(), 0, self._size, micro_tokens, Counts(), planner=self._planner))
        _open.add(self)

    # ------------------------------------------------------------------ what a user calls

    def blocks(self) -> Iterator[Block]:
        """Optimizer steps, from where the loader stands to the end of the last epoch.

        Raises:
            InputError: a sample is malformed or, under `overlength="error"`, too long; the
                ranks' loaders differ; no sample of an epoch is usable.
            EkeError: fetching failed on some rank; it is named, and all ranks raise this.
        """
        while (block := self._next_block(self._epochs, whole=True)) is not None:
            yield block

    def __iter__(self) -> Iterator[MicroBatch]:
        """Micro-batches to the end of the epoch, each an optimizer step with a `scale` of its own.

        Call it once an epoch, as with torch's DataLoader; every epoch has its own order.
        """
        end = self._progress.place.epoch + 1
        if self._epochs is not None:
            end = min(end, self._epochs)
        while (block := self._next_block(end, whole=False)) is not None:
            yield block.micro_batches[0]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, after the last block that it gave; the same on every rank."""
        return self._progress.to_json(self._config)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on any number of ranks.

        Raises:
            InputError: the state was saved with other settings or is damaged; names which.
            EkeError: the loader is closed.
        """
        self._check_open()
        progress = progress_of(state, self._config, self._order.n)
        # A cap that was lowered in the run stays so, unless the user asks for another one.
        lowered = state["config"].get("micro_tokens") == self._micro_tokens
        cap = progress.micro_tokens if lowered else self._micro_tokens
        self._wish = self.stopped = ""
        self._go_to(progress.move_to(self._order, self._size, cap, self._planner))

    @property
    def micro_tokens(self) -> int:
        """The cap that the next block is planned under."""
        return self._progress.micro_tokens

    def take_back(self) -> None:
        """Take back the last block that was given, as if it never had been: it did not train. Every
        rank calls it at the same step. Does not wait for anything.

        Raises:
            EkeError: the loader is closed.
        """
        self._check_open()
        self._stats = self._stats_before
        self._go_to(self._before)

    def lower_cap(self, micro_tokens: int) -> None:
        """Take back the last block that was given, and plan what is left under a lower cap: after
        running out of memory. Every rank calls it at the same step.

        Samples of more tokens than that are cut or dropped where `overlength` says so; else, up to
        `micro_tokens`, each gets a micro-batch of its own.

        Raises:
            InputError: the cap is not lower, or too low.
            EkeError: the loader is closed.
        """
        self._check_open()
        micro_tokens = whole_number("micro_tokens", micro_tokens, 2)
        if micro_tokens >= self._progress.micro_tokens:
            raise InputError(
                "a cap can only be lowered",
                value=micro_tokens,
                rule=f"below {self._progress.micro_tokens}",
            )
        self.take_back()
        at = self._progress.move_to(self._order, self._size, micro_tokens, self._planner)
        self._go_to(at)

    def stop(self, why: str) -> None:
        """Wish that all ranks stop: they do so together, at the end of the round that is made next.

        `blocks` then ends on every rank after the same step, and `stopped` says why. Not a
        collective.
        """
        self._wish = why or "stopped"

    @property
    def stats(self) -> LoaderStats:
        """A copy of the loader's counters."""
        counts = replace(self._progress.counts)
        return replace(self._stats, blocks=self._progress.block, counts=counts)

    def close(self) -> None:
        """End workers and threads; the loader gives no more blocks. Harmless when repeated.

        Not a collective: ranks that ask for another round learn that this one has left.
        """
        self._closed = True
        _open.discard(self)
        self._exchange.leave("it closed its loader")
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.ended(CLOSE_S):
            self._fetcher.kill()
            ahead.ended(CLOSE_S)
        self._fetcher.close()
        self._queue.clear()
        self._samples.clear()

    def __enter__(self) -> DynamicLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EkeError("the loader is closed", fix="Build a new one and load the state into it")

    # ------------------------------------------------------------------ one block

    def _go_to(self, progress: Progress) -> None:
        """Stand at `progress`. When a block is asked for, its round is fetched and planned again,
        and not before a round that is being made is waited for."""
        self._ahead_is_stale = self._ahead is not None
        self._progress = self._before = progress
        self._stats_before = replace(self._stats)
        self._queue: deque[BlockPlan] = deque()
        self._samples: dict[int, Tokens] = {}
        self._round: Round | None = None

    def _next_block(self, end_epoch: int | None, *, whole: bool) -> Block | None:
        """The next block, or its first micro-step alone; None at the end of `end_epoch` epochs."""
        self._check_open()
        while not self._queue:
            if self.stopped or (end_epoch is not None and self._progress.place.epoch >= end_epoch):
                return None
            self._begin_round(end_epoch)
        assert self._round is not None
        arrival = self._round.arrival
        plan, rest = self._queue[0], None
        if not whole:
            plan, rest = plan.first_step()
        samples = plan.samples()
        in_order = sorted(samples, key=lambda sample: arrival[sample.index])
        epoch = self._progress.place.epoch
        label_tokens = sum(sample.label_tokens for sample in samples)
        parts = label_tokens if self._loss == "token" else sum(s.label_tokens > 0 for s in samples)
        scale = self._size / parts if parts else 0.0
        packed = plan.rules.packed
        micro_batches = tuple(
            self._micro_batch(step[self._rank], epoch, scale, packed) for step in plan.steps
        )
        # Not before: an interrupt up to here leaves the block to whoever goes on.
        self._queue.popleft()
        if rest is not None and rest.steps:
            self._queue.appendleft(rest)
        for step in plan.steps:
            for sample in step[self._rank]:
                del self._samples[sample.index]
        self._advance(plan)
        self._stats.micro_batches += len(micro_batches)
        self._stats.dummies += sum(micro_batch.is_dummy for micro_batch in micro_batches)
        return Block(
            micro_batches,
            epoch=epoch,
            index=self._progress.block - 1,
            lengths=[sample.length for sample in in_order],
            shapes=plan.shapes(),
            padded_tokens=plan.occupied_tokens(),
            tallies=tally(plan),
            label_tokens=label_tokens,
            loss_parts=parts,
            position=self.state_dict(),
        )

    def _micro_batch(self, group: Group, epoch: int, scale: float, packed: bool) -> MicroBatch:
        samples = [self._samples[sample.index] for sample in group]
        micro_batch = collate_tokens(
            samples,
            [(epoch, sample.index) for sample in group],
            pad_token_id=self._pad_token_id,
            scale=scale,
            packed=packed,
            loss=self._loss,
        )
        if self._collate is not None:
            items = [sample.item for sample in samples]
            micro_batch = with_extra(micro_batch, items, self._collate)
        return micro_batch.pinned() if self._pins else micro_batch

    def _advance(self, plan: BlockPlan) -> None:
        """Count `plan` as delivered."""
        assert self._round is not None
        samples, before = plan.samples(), self._progress
        counts = replace(before.counts)
        overlong = sum(sample.index in self._round.overlong for sample in samples)
        if self._overlength == "truncate":
            counts.truncated += overlong
        elif self._overlength == "solo":
            counts.solo += overlong
        self._before, self._stats_before = before, replace(self._stats)
        if self._queue:
            delivered = (*before.delivered, *plan.indices())
            self._progress = replace(
                before, block=before.block + 1, counts=counts, delivered=delivered
            )
        else:
            self._progress = self._after_round(before.block + 1, counts)
        stats = self._stats
        stats.samples += len(samples)
        stats.tokens += sum(sample.length for sample in samples)
        stats.padded_tokens += plan.occupied_tokens()
        stats.paced_tokens += plan.paced_tokens()
        stats.capacity_tokens += len(plan.steps) * self._size * plan.rules.micro_tokens

    def _after_round(self, block: int, counts: Counts) -> Progress:
        assert self._round is not None
        cap, waiting = self._progress.micro_tokens, self._round.waiting
        waiting = waiting if any(waiting) else ()
        begun, after = self._round.progress, self._round.after
        begins = begun.begins if after.epoch == begun.place.epoch else ""
        return Progress(
            after, block, self._size, cap, counts, waiting, begins=begins, planner=self._planner
        )

    # ------------------------------------------------------------------ one round

    def _begin_round(self, end_epoch: int | None) -> None:
        """Take the next round, and begin to make the one after it."""
        kept = {} if self._round is None else self._round.samples
        began = time.perf_counter()
        if self._ahead_is_stale:
            self._drop_ahead()
        if self._ahead is None:
            made = self._make(self._progress, kept)
        else:
            self._ahead.wait()  # an interrupt leaves it where it is, for whoever goes on
            ahead, self._ahead = self._ahead, None
            made = ahead.take()
        stats = self._stats
        stats.wait_s += time.perf_counter() - began
        stats.fetch_s += made.fetch_s
        stats.exchange_s += made.exchange_s
        stats.plan_s += made.plan_s
        if made.stop:
            self.stopped = made.stop
            return
        stats.rounds += 1
        # A round that was made ahead knew neither how many blocks this one would be delivered in
        # nor what of it was cut.
        counts = made.counted(self._progress.counts)
        self._progress = replace(made.progress, block=self._progress.block, counts=counts)
        self._round = made
        self._queue, self._samples = deque(made.plans), made.samples
        after = self._after_round(self._progress.block + len(made.plans), counts)
        if not self._queue:
            self._progress = after
        if self._thread_ahead and (end_epoch is None or after.place.epoch < end_epoch):
            # What is left over is this rank's still; what trains is taken out as it is delivered.
            over = chain(after.place.pending, *after.waiting)
            kept = {i: made.samples[i] for i in over if i in made.samples}
            self._ahead = Ahead(lambda: self._make(after, kept), "eke-round")

    def _make(self, start: Progress, kept: dict[int, Tokens]) -> Round:
        return self._maker.make(start, kept, self._wish)

    def _drop_ahead(self) -> None:
        """Let a round that is being made come to its end, on all ranks, and forget it, its faults
        too: they show again if the loader comes back there, and a lost rank in the next call."""
        if self._ahead is not None:
            self._ahead.wait()
            self._ahead = None
        self._ahead_is_stale = False


_open: weakref.WeakSet[DynamicLoader] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is in the middle of a call when Python ends can bring the process down."""
    for loader in list(_open):
        loader.close()
