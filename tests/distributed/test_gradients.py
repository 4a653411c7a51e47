"""The mean of the ranks' gradients, whatever each of them has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from eke.distributed import average_gradients, init, shutdown, world
from eke.distributed.gradients import BUCKET_BYTES

MANY = BUCKET_BYTES // 4 + 1000


def parameters() -> list[torch.nn.Parameter]:
    """Of rank r: gradients of several types and shapes, one larger than a bucket, some missing."""
    rank = world().rank
    made = [
        torch.nn.Parameter(torch.zeros(3, 2)),
        torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)),
        torch.nn.Parameter(torch.zeros(MANY)),
        torch.nn.Parameter(torch.zeros(4)),  # rank 0 alone has a gradient
        torch.nn.Parameter(torch.zeros(4)),  # nobody has
        torch.nn.Parameter(torch.zeros(2), requires_grad=False),
        torch.nn.Parameter(torch.zeros(2, 3).t()),
    ]
    made[0].grad = torch.arange(6.0).view(3, 2) + rank
    made[1].grad = torch.full((5,), 1 / 3 + rank, dtype=torch.float64)
    made[2].grad = torch.full((MANY,), float(2 * rank))
    if rank == 0:
        made[3].grad = torch.ones(4)
    made[6].grad = (torch.arange(6.0).view(2, 3) * (1 + rank)).t()
    return made


def test_alone_gradients_stay_as_they_are() -> None:
    made = parameters()
    before = [p.grad for p in made]
    average_gradients(made)
    assert all(p.grad is grad for p, grad in zip(made, before, strict=True))


def test_two_ranks_get_the_mean_and_the_same_bits(start_ranks: Any) -> None:
    ranks = start_ranks(2, Path(__file__))
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    zero, one = (json.loads(out) for out, _ in outputs)
    assert zero == one
    assert zero == [
        [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]],
        [(1 / 3) / 2 + (4 / 3) / 2] * 5,
        [1.0, 1.0, MANY],
        [0.5] * 4,
        None,
        None,
        [[0.0, 4.5], [1.5, 6.0], [3.0, 7.5]],
    ]


def main() -> None:
    init()
    made = parameters()
    average_gradients(made)
    grads: list[Any] = [None if p.grad is None else p.grad.tolist() for p in made]
    grads[2] = [min(grads[2]), max(grads[2]), len(grads[2])]
    print(json.dumps(grads))
    shutdown()


if __name__ == "__main__":
    sys.exit(main())
