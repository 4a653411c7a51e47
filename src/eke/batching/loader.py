"""The loader: each rank fetches its share of a window, all plan it alike, each trains its part.

One round: every rank fetches its share of the next window, the ranks exchange lengths and label
counts (integers, once a window), and every rank computes the same plan for all. The next window
is fetched by the workers while this one trains.

Properties: every rank gets the same number of blocks and of micro-batches; every sample that is
not dropped by a stated policy is delivered exactly once an epoch; a loader that loads a state
goes on where the saved one stood, with the same blocks on as many ranks, and with the samples
that were left on any other number; what fails on one rank is raised on all, in the same round.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, get_args

from eke.batching.batch import Block, MicroBatch, Tokens, collate
from eke.batching.fetch import SampleDataset, SampleFetcher
from eke.batching.order import Order, Place
from eke.batching.planner import BlockPlan, PerStep, Sample, plan_window
from eke.batching.ranks import Ranks
from eke.batching.state import Counts, Progress, progress_of
from eke.batching.triage import Overlength, Triage
from eke.errors import EkeError, InputError


@dataclass
class LoaderStats:
    """What the loader did since it was built; `counts` and `blocks` go on over a resume.

    Tokens and samples are of all ranks; `micro_batches`, `dummies` and seconds are this rank's.

    Attributes:
        paced_tokens: padded tokens if every rank had the slowest rank's of each micro-step.
        exchange_s: in the exchange of lengths, mostly waiting for other ranks.
        wait_s: waiting for this rank's samples.
    """

    blocks: int = 0
    rounds: int = 0
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    paced_tokens: int = 0
    micro_batches: int = 0
    dummies: int = 0
    exchange_s: float = 0.0
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


class DynamicLoader:
    """Forms micro-batches under a hard cap on their padded tokens, aligned over ranks.

    Args:
        dataset: map-style, the whole dataset on every rank; item i is a mapping with `input_ids`
            and `labels` (integers [T]) and always the same. Its `fingerprint`, if it is a
            string, must agree when a state is loaded. Items of no tokens are dropped and counted.
        micro_tokens: most padded tokens of one micro-batch.
        per_step: what an optimizer step consumes over all ranks: `tokens:N` (about N) or
            `samples:N` (exactly N, but for the last step of an epoch).
        window: samples that each rank looks ahead. A round takes more windows if one is less
            than a step.
        overlength: what becomes of a sample of more than `micro_tokens` tokens: `error` ends all
            ranks, `truncate` keeps its first tokens, `skip` drops it, `solo` gives it a
            micro-batch of its own; each counted in `stats.counts`.
        shuffle: a new order each epoch, from `seed`; else the dataset's order.
        epochs: end after so many epochs; `None` never ends.
        ranks: how to reach the other ranks; by default those of the torch.distributed job.

    Raises:
        InputError: an argument is out of its range, or the ranks cannot be reached.
    """

    def __init__(
        self,
        dataset: SampleDataset,
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
        ranks: Ranks | None = None,
    ) -> None:
        _check_at_least("micro_tokens", micro_tokens, 2)
        _check_at_least("window", window, 1)
        _check_at_least("num_workers", num_workers, 0)
        _check_at_least("seed", seed, 0)
        if epochs is not None:
            _check_at_least("epochs", epochs, 0)
        if overlength not in get_args(Overlength):
            rule = f"it is one of {', '.join(get_args(Overlength))}"
            raise InputError("overlength is not a known policy", value=overlength, rule=rule)
        self._per_step = PerStep.parse(per_step)
        self._ranks = ranks or Ranks.of_job()
        self._micro_tokens, self._overlength = micro_tokens, overlength
        self._pad_token_id, self._epochs = pad_token_id, epochs
        samples = len(dataset)
        if samples == 0:
            raise InputError("the dataset has no samples", fix="Check the data's files and filters")
        fingerprint = getattr(dataset, "fingerprint", None)
        self._config: dict[str, Any] = {
            "dataset_length": samples,
            "dataset_fingerprint": fingerprint if isinstance(fingerprint, str) else None,
            "micro_tokens": micro_tokens,
            "per_step": per_step,
            "window": window,
            "seed": seed,
            "overlength": overlength,
            "shuffle": shuffle,
        }
        self._order = Order(samples, seed, shuffle)
        self._round_samples = window * self._ranks.size
        if self._per_step.unit == "samples":
            # Whole steps, so that a round leaves nothing over unless it drops samples.
            n = self._per_step.amount
            self._round_samples = max(1, self._round_samples // n) * n
        self._fetcher = SampleFetcher(
            dataset,
            limit=micro_tokens if overlength == "truncate" else None,
            most=-(-self._round_samples // self._ranks.size),
            num_workers=num_workers,
            start_method=start_method,
        )
        self._stats = LoaderStats()
        self._closed = False
        self._go_to(Progress(Place(), 0, self._ranks.size, Counts()))

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
        """
        progress = progress_of(state, self._config, self._order.n)
        self._go_to(progress.reshard(self._order, self._ranks.size))

    @property
    def stats(self) -> LoaderStats:
        """A copy of the loader's counters."""
        counts = replace(self._progress.counts)
        return replace(self._stats, blocks=self._progress.block, counts=counts)

    def close(self) -> None:
        """End the workers; the loader gives no more blocks. Harmless when repeated."""
        self._closed = True
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

    # ------------------------------------------------------------------ one block

    def _go_to(self, progress: Progress) -> None:
        """Stand at `progress`; its round is fetched and planned again when a block is asked for."""
        self._progress = progress
        self._queue: deque[BlockPlan] = deque()
        self._samples: dict[int, Tokens] = {}
        # The round in progress: where it stood before its first block, and where the next begins.
        self._round, self._after = progress, progress.place
        self._overlong: set[int] = set()

    def _next_block(self, end_epoch: int | None, *, whole: bool) -> Block | None:
        """The next block, or its first micro-step alone; None at the end of `end_epoch` epochs."""
        if self._closed:
            raise EkeError("the loader is closed", fix="Build a new one and load the state into it")
        while not self._queue:
            if end_epoch is not None and self._progress.place.epoch >= end_epoch:
                return None
            self._plan_round()
        plan = self._queue.popleft()
        if not whole:
            plan, rest = plan.first_step()
            if rest.steps:
                self._queue.appendleft(rest)
        samples = plan.samples()
        self._advance(plan)
        label_tokens = sum(sample.label_tokens for sample in samples)
        scale = self._ranks.size / label_tokens if label_tokens else 0.0
        epoch = self._round.place.epoch
        micro_batches = tuple(
            collate(
                [self._samples.pop(sample.index) for sample in step[self._ranks.rank]],
                [(epoch, sample.index) for sample in step[self._ranks.rank]],
                pad_token_id=self._pad_token_id,
                scale=scale,
            )
            for step in plan.steps
        )
        self._stats.micro_batches += len(micro_batches)
        self._stats.dummies += sum(micro_batch.is_dummy for micro_batch in micro_batches)
        return Block(
            micro_batches,
            epoch=epoch,
            index=self._progress.block - 1,
            lengths=[sample.length for sample in samples],
            shapes=plan.shapes(),
            padded_tokens=plan.padded_tokens(),
            label_tokens=label_tokens,
            position=self.state_dict(),
        )

    def _advance(self, plan: BlockPlan) -> None:
        """Count `plan` as delivered."""
        samples = plan.samples()
        before = self._progress if self._progress.delivered else self._round
        counts = replace(before.counts)
        overlong = sum(sample.index in self._overlong for sample in samples)
        if self._overlength == "truncate":
            counts.truncated += overlong
        elif self._overlength == "solo":
            counts.solo += overlong
        block = before.block + 1
        if self._queue:
            delivered = (*before.delivered, *plan.indices())
            self._progress = replace(before, block=block, counts=counts, delivered=delivered)
        else:
            self._progress = Progress(self._after, block, self._ranks.size, counts)
        self._stats.samples += len(samples)
        self._stats.tokens += sum(sample.length for sample in samples)
        self._stats.padded_tokens += plan.padded_tokens()
        self._stats.paced_tokens += plan.paced_tokens()

    # ------------------------------------------------------------------ one round

    def _plan_round(self) -> None:
        """Fetch, exchange and plan the round at `self._progress`, less what of it is delivered."""
        start, size = self._progress, self._ranks.size
        after, taken = start.place, list[int]()
        self._samples.clear()
        triage = Triage(self._micro_tokens, self._overlength, [[] for _ in range(size)])
        while triage.filled(self._per_step) < self._per_step.amount:
            if self._order.is_exhausted(after):
                break
            indices, after = self._order.window(after, self._round_samples)
            taken += indices
            for position, sample in enumerate(self._exchange(indices)):
                triage.add(position % size, sample)
        plans = plan_window(
            triage.shares,
            micro_tokens=self._micro_tokens,
            per_step=self._per_step,
            world_size=size,
            rng_seed=self._rng_seed(start.place),
        )
        if self._order.is_exhausted(after):
            after = Place(after.epoch + 1)
        elif self._per_step.unit == "samples" and len(plans[-1].samples()) < self._per_step.amount:
            # Dropped samples left the last step short: its samples open the next round.
            short = set(plans.pop().indices())
            rest = tuple(index for index in taken if index in short)
            after = Place(after.epoch, after.cursor, rest + after.pending)
        if not plans and start.place == Place(start.place.epoch):
            raise InputError(
                f"no sample of the dataset is usable: {len(triage.empty)} have no tokens, "
                f"{len(triage.skipped)} are longer than micro_tokens = {self._micro_tokens}",
                fix="Check the data, raise micro_tokens, or set overlength to 'truncate'",
            )
        counts = replace(start.counts)
        counts.empty += len(triage.empty)
        counts.skipped += len(triage.skipped)
        dropped = (*triage.empty, *triage.skipped)
        self._round = Progress(
            start.place, start.block, size, counts, taken=len(taken), dropped=dropped
        )
        self._after, self._overlong = after, triage.overlong
        self._queue = _undelivered(plans, start.delivered)
        self._stats.rounds += 1
        if not self._queue:
            self._progress = Progress(after, start.block, size, counts)
        if self._epochs is None or after.epoch < self._epochs:
            ahead, _ = self._order.window(after, self._round_samples)
            self._fetcher.start(ahead[self._ranks.rank :: size])

    def _exchange(self, indices: list[int]) -> list[Sample]:
        """Fetch this rank's share of `indices`; all their sizes, with lengths before truncation."""
        rank, size = self._ranks.rank, self._ranks.size
        mine = indices[rank::size]
        at, block = self._progress.place, self._progress.block
        position = [block, at.epoch, at.cursor, len(at.pending), len(self._progress.delivered)]
        header = {**self._config, "position": position}
        begin = time.perf_counter()
        try:
            fetched = self._fetcher.take(mine)
        except EkeError as error:
            self._ranks.agree(header, {}, error)
            raise
        self._samples.update(zip(mine, fetched, strict=True))
        sizes = [(tokens.full_length, tokens.label_tokens) for tokens in fetched]
        middle = time.perf_counter()
        replies = self._ranks.agree(header, {"sizes": sizes})
        self._stats.wait_s += middle - begin
        self._stats.exchange_s += time.perf_counter() - middle
        return [
            Sample(index, *replies[i % size]["sizes"][i // size]) for i, index in enumerate(indices)
        ]

    def _rng_seed(self, place: Place) -> int:
        name = f"{self._config['seed']}/{place.epoch}/{place.cursor}/{len(place.pending)}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _undelivered(plans: list[BlockPlan], delivered: Sequence[int]) -> deque[BlockPlan]:
    """What is left of a round's plan after the samples at its front that were delivered.

    Raises:
        EkeError: the plan does not begin with them, so the dataset gives other samples now.
    """
    queue, left = deque(plans), tuple(delivered)
    while left:
        plan = queue.popleft() if queue else BlockPlan(())
        if len(plan.samples()) > len(left):
            plan, rest = plan.first_step()
            queue.appendleft(rest)
        indices = tuple(plan.indices())
        if not indices or indices != left[: len(indices)]:
            raise EkeError(
                "the dataset no longer gives the samples that the loader's state was saved with",
                rule="item i must be the same whenever it is asked for",
                fix="Resume with the data and the pipeline of the saved run, or start a new run",
            )
        left = left[len(indices) :]
    return queue


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name} is too small", value=value, rule=f"it is at least {least}")
