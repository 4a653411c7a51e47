"""A model's shape as plain data, read off its modules without touching a weight.

Works on a model on the `meta` device as well, so that planning needs no memory. Covers dense
decoders: a list of equal-typed blocks between an input embedding and an output head. In a
mixture of experts every expert counts as if it were active, which overstates the FLOPs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from eke.budget.flops import BlockShape, DecoderShape
from eke.errors import InputError


def shape_of(model: nn.Module) -> DecoderShape:
    """The shape of a transformers causal language model.

    Raises:
        InputError: no list of decoder blocks, or no embedding or head, can be found.
    """
    m: Any = model
    blocks = _blocks(model)
    head = m.get_output_embeddings() if hasattr(m, "get_output_embeddings") else None
    embedding = m.get_input_embeddings() if hasattr(m, "get_input_embeddings") else None
    if blocks is None or head is None or embedding is None:
        raise InputError(
            "this model is not a decoder that eke can read",
            value=type(model).__name__,
            rule="it needs an input embedding, a list of blocks and an output head",
            fix="Use a causal language model of transformers",
        )
    width = _attention_width(m.config)
    groups = {"embedding": 0, "blocks": 0, "norm": 0, "head": 0}
    trained = 0
    norm_trains = False
    # GPT-2 and its like have a second table, for positions: trained, it needs gradients as well.
    tables = [embedding, *(t for t in model.modules() if isinstance(t, nn.Embedding))]
    # Ids, not storages: on the meta device all storages are alike.
    members = {id(p): "embedding" for table in tables for p in table.parameters()}
    members |= {id(p): "blocks" for p in blocks.parameters()}
    for p in head.parameters():
        members.setdefault(id(p), "head")
    for p in model.parameters():
        group = members.get(id(p), "norm")
        groups[group] += p.numel()
        trained += p.numel() if p.requires_grad else 0
        norm_trains |= group == "norm" and p.requires_grad
    first = next(model.parameters())
    return DecoderShape(
        blocks=tuple(_block(b, width) for b in blocks),
        head_params=head.weight.numel(),
        head_trains=head.weight.requires_grad,
        embedding_trains=any(
            p.requires_grad for p in model.parameters() if members.get(id(p)) == "embedding"
        ),
        hidden=int(m.config.hidden_size),
        vocab=int(embedding.weight.shape[0]),
        parameters=groups,
        trained_parameters=trained,
        bytes_per_parameter=first.element_size(),
        norm_trains=norm_trains,
    )


def _blocks(model: nn.Module) -> nn.ModuleList | None:
    """The longest list of modules that hold parameters: the decoder's blocks."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    lists = [m for m in lists if len({type(b) for b in m}) == 1]
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)


def _matrices(block: nn.Module) -> list[torch.Tensor]:
    """Weights that a matrix product uses: nn.Linear's, and GPT-2's transposed Conv1D."""
    return [
        m.weight
        for m in block.modules()
        if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
        if isinstance(m.weight, torch.Tensor)
    ]


def _block(block: nn.Module, width: int) -> BlockShape:
    weights = _matrices(block)
    return BlockShape(
        matmul_params=sum(w.numel() for w in weights),
        attention_width=width,
        trained_matmul_params=sum(w.numel() for w in weights if w.requires_grad),
        trains=any(p.requires_grad for p in block.parameters()),
    )


def _attention_width(config: Any) -> int:
    if getattr(config, "num_attention_heads", None) is None:
        raise InputError(
            "this model is not a decoder that eke can read",
            value=type(config).__name__,
            rule="its blocks need attention",
            fix="Use a transformer of transformers",
        )
    heads = int(config.num_attention_heads)
    size = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    return 2 * heads * int(size)
