"""Packed micro-batches and transformers models: what a model is given, and whether it heeds it.

A model of transformers finds where samples end in `position_ids`, and only if it keeps no cache and
is given no mask; else it lets them see one another, without a word. So the cache is refused here,
and a model is asked before it is trained.

Shape letters: T positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eke.errors import InputError

_PROBED = 5
"""Tokens of the sample that is watched while the one before it changes."""


def packed_arguments(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What `model` is given besides the ids of a packed batch; `position_ids` are `[1, T]`.

    Flash attention gets the ends of the samples besides: it then does not search for them.
    """
    positions_T = batch["position_ids"]
    arguments: dict[str, Any] = {"position_ids": positions_T, "use_cache": False}
    config = getattr(getattr(model, "module", model), "config", None)
    if "flash" in str(getattr(config, "_attn_implementation", "")):
        starts = (positions_T[0] == 0).nonzero()[:, 0]
        ends = torch.cat([starts, starts.new_tensor([positions_T.shape[1]])]).to(torch.int32)
        longest = int(positions_T.max()) + 1
        arguments |= {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    return arguments


@torch.no_grad()
def check_packing(
    model: Any,
    vocab: int,
    device: torch.device,
    context: contextlib.AbstractContextManager[Any],
) -> None:
    """Ask the model itself: what it says of a sample must not depend on what is packed before it.

    Args:
        vocab: number of token ids.
        context: the autocast context that it computes in.

    Raises:
        InputError: it does.
    """
    own_T = torch.arange(_PROBED) * 7 % vocab
    befores = [own_T[:0], torch.arange(6) * 5 % vocab, (torch.arange(6) * 3 + 1) % vocab]
    was_training = model.training
    model.eval()
    try:
        found = []
        for before_T in befores:
            ids_T = torch.cat([before_T, own_T])[None].to(device)
            positions_T = torch.cat([torch.arange(len(before_T)), torch.arange(_PROBED)])
            batch = {"position_ids": positions_T[None].to(device)}
            with context:
                logits = model(input_ids=ids_T, **packed_arguments(model, batch)).logits
            found.append(logits[0, -_PROBED:].double().cpu())
    finally:
        model.train(was_training)
    alone_TV, *others = found
    # In half precision the same product differs by the shape that it is part of.
    tolerance = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 2e-2
    apart = max(float((other - alone_TV).abs().max()) for other in others)
    if not apart <= tolerance * float(alone_TV.abs().max()):
        raise InputError(
            "this model cannot be trained on packed micro-batches",
            value=f"logits of a sample differ by {apart:.3g} with what is packed before it",
            rule="samples in one row must not see one another",
            fix="Leave batch.packing at false",
        )
