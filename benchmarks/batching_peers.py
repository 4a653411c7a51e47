"""What other batchers would train on: each peer's own code, on lengths alone, as schedules.

Each is driven as its users drive it; what that means is said at each function. All but the package
online-dynamic-batching know every length beforehand, which eke does not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

from benchmarks.batching_schedules import (
    Schedule,
    Step,
    dealt,
    figures,
    in_batches,
    shuffled,
)

# ---------------------------------------------------------------------- online-dynamic-batching


class _Gathered(Exception):
    """Stops a grouping where it would wait for the other ranks."""


class _FakeGather:
    """`torch.distributed` of one rank: what it sends is kept, what it receives is given."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: Any = None
        self.received: Any = None

    def get_world_size(self, group: Any) -> int:
        return self.size

    def get_rank(self, group: Any) -> int:
        return self.rank

    def all_gather_into_tensor(self, out: Any, mine: Any, group: Any) -> None:
        if self.received is None:
            self.sent = mine.clone()
            raise _Gathered
        out.copy_(self.received)


def odb(lengths: Sequence[int], cap: int, ranks: int, window: int, seed: int) -> Schedule:
    """The grouping of online-dynamic-batching 0.1.2, join mode, look-ahead `window` from the start.

    `grouping_data` is the package's; around it is the loop of its `collate_loop_odb`: a rank asks
    for a grouping when its buffer has `window` new samples, what overflows goes back to the
    buffer, a rank at the end of its data says so until all have. All ranks shuffle groups by one
    seed, so an unshuffled schedule has the same micro-steps.
    """
    import torch
    from odb import grouping

    ordered = shuffled(lengths, seed)
    streams = [ordered[rank::ranks] for rank in range(ranks)]
    buffers: list[list[int]] = [[] for _ in range(ranks)]
    samples = {n: torch.empty(()).expand(n) for n in set(lengths)}
    nets = [_FakeGather(rank, ranks) for rank in range(ranks)]
    steps: list[Step] = []

    def grouped(rank: int, fresh: int, *, over: bool) -> Any:
        buffer = [[{"input_ids": samples[n]}] for n in buffers[rank]]
        with mock.patch.object(grouping, "dist", nets[rank]):
            return grouping.grouping_data(
                buffer,
                cap,
                ddp_group=nets[rank],
                is_finished=over,
                idx_budget=fresh,
                join_mode=True,
                max_groups=window,
            )

    def size(sample: Any) -> int:
        return int(sample["input_ids"].numel())

    at = 0
    while True:
        calls = []
        for rank, stream in enumerate(streams):
            fresh = stream[at : at + window]
            buffers[rank] += fresh
            calls.append((rank, len(fresh)))
        at += window
        # First every rank's part of the gather, then every rank's answer from all of them.
        for rank, fresh in calls:
            nets[rank].received = None
            try:
                grouped(rank, fresh, over=not fresh)
            except _Gathered:
                continue
            raise AssertionError("the package no longer gathers")
        everything = torch.cat([net.sent for net in nets])
        columns, finished = [], False
        for rank, fresh in calls:
            nets[rank].received = everything
            groups, overflow, finished, _ = grouped(rank, fresh, over=not fresh)
            buffers[rank] = [size(sample) for sample in overflow]
            # Without a free place for its batch a rank gives nothing.
            columns.append([[size(s) for s in group] for group in groups][:fresh])
        for number in range(max(map(len, columns))):
            steps.append([one[number] if number < len(one) else [] for one in columns])
        if finished:
            return Schedule(steps)


# ---------------------------------------------------------------------- transformers


def length_grouped(lengths: Sequence[int], ranks: int, size: int, seed: int) -> Schedule:
    """`LengthGroupedSampler` as transformers' Trainer uses it (`group_by_length`): batches of
    `size` one after another, dealt to the ranks in turn."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(seed)
    order = list(LengthGroupedSampler(size, lengths=list(lengths), generator=generator))
    return Schedule(dealt(in_batches([lengths[i] for i in order], size), ranks))


def rebalanced(
    lengths: Sequence[int], ranks: int, per_step: int, accumulate: int, seed: int
) -> Schedule:
    """`BatchRebalanceSampler` on the epoch's order; the last step is kept (`drop_last=False`).

    What every rank would be given is asked for once, not once a rank.
    """
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    class Every(BatchRebalanceSampler):  # type: ignore[misc]
        def _yield_global_batch(self, batch_indices: list[int]) -> Any:
            yield self._assign(batch_indices, [self.lengths[i] for i in batch_indices])

    ordered = shuffled(lengths, seed)
    sampler = Every(ordered, per_step, ranks, accumulate, shuffle=False, drop_last=False)
    return Schedule(
        [
            [[ordered[i] for i in batches[number]] for batches in step]
            for step in sampler
            for number in range(accumulate)
        ]
    )


def fitting_rebalanced(
    lengths: Sequence[int], cap: int, ranks: int, per_step: int, seed: int
) -> Schedule:
    """With the fewest accumulated micro-steps (1, 2, 4, ...) that keep the cap, of which the
    sampler knows nothing; if no number does, with the one that exceeds it least often."""
    found: list[tuple[float, int, Schedule]] = []
    accumulate = 1
    while accumulate * ranks <= per_step and (not found or found[-1][0]):
        one = rebalanced(lengths, ranks, per_step, accumulate, seed)
        found.append((figures(one, lengths, cap)["over"], accumulate, one))
        accumulate *= 2
    if not found:
        raise ValueError(f"{per_step} samples are too few for {ranks} ranks")
    return min(found, key=lambda each: each[:2])[2]


# ---------------------------------------------------------------------- lhotse


def lhotse(lengths: Sequence[int], cap: int, ranks: int, seed: int) -> Schedule:
    """`DynamicBucketingSampler` of every rank: 30 buckets, buckets in step.

    A duration is a length in tokens; its cap is count times longest, as for eke. To have as
    many batches on every rank it gives some cuts twice.
    """
    from lhotse import CutSet
    from lhotse.cut import MonoCut
    from lhotse.dataset import DynamicBucketingSampler
    from lhotse.testing.dummies import dummy_recording

    recording = dummy_recording(0, duration=float(max(lengths) + 1))
    cuts = CutSet(
        [
            MonoCut(id=str(i), start=0, duration=float(n), channel=0, recording=recording)
            for i, n in enumerate(lengths)
        ]
    )
    columns = [
        [
            [lengths[int(cut.id.split("_")[0])] for cut in batch]
            for batch in DynamicBucketingSampler(
                cuts,
                max_duration=float(cap),
                num_buckets=30,
                shuffle=True,
                seed=seed,
                world_size=ranks,
                rank=rank,
            )
        ]
        for rank in range(ranks)
    ]
    steps = [
        [column[number] if number < len(column) else [] for column in columns]
        for number in range(max(map(len, columns)))
    ]
    return Schedule(steps)


# ---------------------------------------------------------------------- TRL


def trl(lengths: Sequence[int], cap: int, ranks: int, strategy: str, seed: int) -> Schedule:
    """`pack_dataset` by `bfd` or `wrapped`, with its own batches of 1,000 rows; rows of `cap`
    tokens, shuffled, dealt to the ranks.

    A sample is told by an id that all its tokens bear; one whose tokens are not all in one row is
    not whole.
    """
    import numpy as np
    from datasets import Dataset, disable_progress_bars
    from trl.data_utils import pack_dataset

    disable_progress_bars()
    order = random.Random(seed).sample(range(len(lengths)), len(lengths))
    rows = Dataset.from_dict({"input_ids": [np.full(lengths[i], i, dtype=np.int32) for i in order]})
    packed, whole = [], 0
    for row in pack_dataset(rows, cap, strategy).with_format("numpy"):
        ids = np.asarray(row["input_ids"])
        cuts = np.flatnonzero(np.diff(ids)) + 1
        parts = np.split(ids, cuts)
        whole += sum(len(part) == lengths[int(part[0])] for part in parts)
        packed.append([len(part) for part in parts])
    random.Random(seed).shuffle(packed)
    return Schedule(dealt(packed, ranks), packed=True, whole=whole)
