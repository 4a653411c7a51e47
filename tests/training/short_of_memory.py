"""One rank of a job in which rank 1 has too little memory; run by test_memory.py.

Takes a run.toml, and how many tokens rank 1 can take in one pass: more of them fail in the middle
of the backward pass, as an allocation there would. And how many in a pass of an evaluation.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from eke.distributed import world
from eke.errors import EkeError
from eke.training import RunConfig, Trainer, evaluate, stepping

whole = stepping.token_losses


def refuse(_: torch.Tensor) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")


def losses(model: Any, batch: Any) -> torch.Tensor:
    found = whole(model, batch)
    if world().rank == world().size - 1 and batch["input_ids"].numel() > int(sys.argv[2]):
        model.module.model.layers[0].mlp.up_proj.weight.register_hook(refuse)
        found.register_hook(lambda grad: grad)
    return found


def once(model: Any, batch: Any) -> torch.Tensor:
    """The hook is on a parameter: it must go with the pass that it was meant for."""
    for parameter in model.parameters():
        parameter._backward_hooks = None
    return losses(model, batch)


def held_out(model: Any, batch: Any) -> torch.Tensor:
    if world().rank == world().size - 1 and batch["input_ids"].numel() > int(sys.argv[3]):
        refuse(batch["input_ids"])
    return whole(model, batch)


if __name__ == "__main__":
    stepping.token_losses = once
    evaluate.token_losses = held_out
    try:
        sys.exit(Trainer(RunConfig.load(sys.argv[1])).train().exit_code)
    except EkeError as error:
        print(error)
        sys.exit(error.exit_code)
