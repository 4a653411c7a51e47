"""Gradients averaged over ranks in a call of its own, once all ranks know that all have theirs.

DistributedDataParallel averages during the backward pass: a rank that runs out of memory in it
leaves the others waiting. Here nothing is exchanged before the ranks have agreed to.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from eke.distributed.world import world
from eke.errors import EkeError

BUCKET_BYTES = 25 * 2**20
"""Gradients travel in stretches of about so many bytes, as DistributedDataParallel's do."""


@torch.no_grad()
def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace every gradient by its mean over ranks. A collective; with one rank, nothing.

    All ranks pass the same parameters in the same order. A gradient that some rank does not have
    counts as zero there; one that no rank has stays None. The result is the same bits on all.

    Raises:
        EkeError: a rank is gone or late.
    """
    if world().size == 1:
        return
    trained = [p for p in parameters if p.requires_grad]
    try:
        _average(trained)
    except RuntimeError as error:
        raise EkeError(
            f"rank {world().rank} of {world().size} lost the other ranks: {error}",
            fix="See which rank ended first in its own log; start the job again to resume",
        ) from error


def _average(trained: list[torch.nn.Parameter]) -> None:
    if not trained:
        return
    there = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32)
    there = there.to(trained[0].device)
    dist.all_reduce(there, op=dist.ReduceOp.MAX)
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter, wanted in zip(trained, there.tolist(), strict=True):
        if not wanted:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if bucket and (size >= BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            _average_bucket(bucket)
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel() * grad.element_size()
    if bucket:
        _average_bucket(bucket)


def _average_bucket(grads: list[torch.Tensor]) -> None:
    flat = torch.cat([grad.flatten() for grad in grads])
    flat /= world().size  # before the sum, which could overflow
    dist.all_reduce(flat)
    start = 0
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        start += grad.numel()
