"""How many tokens fit into one pass: tried on the model itself, before the first step.

The closed form of `footprint` says where to begin; what it promises is run, forward and backward,
beside as much memory as gradients and the optimizer's state will take. Where that fails, the most
that passes is found by bisection. Memory that the system promises and then does not have, as
Linux does, ends the process instead of an allocation: no probe can see that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from eke.distributed import world
from eke.training.loss import token_losses
from eke.training.memory import is_out_of_memory


def largest_fitting(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The most of [least, most] that fits, to within an eighth of it; 0 if not even `least` does.

    `most` is tried first. If what is more than fits does not fit either, then the result fits, and
    nothing does that is more than an eighth (or 1) above it.
    """
    if fits(most):
        return most
    if most <= least or not fits(least):
        return 0
    low, high = least, most
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def worst_batches(tokens: int, longest: int, *, packing: bool) -> Iterator[dict[str, Any]]:
    """Batches of so many tokens that take the most memory: short samples, then the longest.

    The last comes twice, for the second pass finds the gradients of the first beside it.
    """
    shortest = min(2, longest)
    for length in (shortest, longest, longest):
        rows = max(1, tokens // length)
        ids_BT = torch.zeros((rows, length), dtype=torch.long)
        if packing:
            positions_T = torch.arange(length).repeat(rows)
            flat = ids_BT.view(1, -1)
            yield {"input_ids": flat, "labels": flat, "position_ids": positions_T[None]}
        else:
            mask_BT = torch.ones_like(ids_BT)
            mask_BT[0, -1] = 0  # a whole mask would be left out
            yield {"input_ids": ids_BT, "labels": ids_BT, "attention_mask": mask_BT}


def fits_in_memory(
    model: Any,
    tokens: int,
    longest: int,
    device: torch.device,
    context: contextlib.AbstractContextManager[Any],
    *,
    packing: bool,
) -> bool:
    """Whether the worst batches of so many tokens pass, beside the optimizer's state.

    The model is left without gradients, and otherwise as it was.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    # AdamW's two moments, and with several ranks DistributedDataParallel's buckets.
    beside = 2 * 4 * count + (4 * count if world().size > 1 else 0)
    try:
        kept = torch.empty(beside, dtype=torch.uint8, device=device)
        for batch in worst_batches(tokens, longest, packing=packing):
            moved = {name: tensor.to(device) for name, tensor in batch.items()}
            with context:
                loss = token_losses(model, moved).sum()
            torch.autograd.backward(loss)
        del kept
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        for parameter in trained:
            parameter.grad = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return True
