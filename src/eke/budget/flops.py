"""FLOPs of a decoder in closed form: forward, backward, frozen parts, recomputation.

A multiply-add counts as two operations. Counted are the matrix products of linear layers and of
attention (all T x T positions, as a dense kernel computes them); norms, activations and
embedding look-ups are not, as usual (Kaplan et al. 2020, arXiv 2001.08361, section 2.1, whose 6 N
per token is the special case of full training without the attention term).

Backward costs, per linear layer, one product for the gradient of its input, needed while
anything at or below it is trained, and one for the gradient of its trained weights.

Recomputation counts a block's whole forward once more. PyTorch's checkpointing stops it as soon
as all that the backward needs is there, usually before the block's last product: a few per cent
less than is counted here.

Shape letters: B sequences, T positions, n = B T.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockShape:
    """One transformer block: `matmul_params` weights in linear layers, of which
    `trained_matmul_params` are trained; `attention_width` = heads x (query + value head size);
    `trains` says whether anything in the block is trained, norms and biases included."""

    matmul_params: int
    attention_width: int
    trained_matmul_params: int
    trains: bool


@dataclass(frozen=True)
class DecoderShape:
    """A decoder as plain numbers: parameters by group, blocks from the bottom up, and the head.

    `embedding_trains` is true when the input embedding is trained, so that gradients flow
    through every block; `norm_trains`, when anything between the last block and the head is.
    `parameters` maps group (`embedding`, `blocks`, `norm`, `head`) to its
    number of parameters, tied ones counted once.
    """

    blocks: tuple[BlockShape, ...]
    head_params: int
    head_trains: bool
    embedding_trains: bool
    hidden: int
    vocab: int
    parameters: dict[str, int]
    trained_parameters: int
    bytes_per_parameter: int
    norm_trains: bool = False

    @property
    def n_parameters(self) -> int:
        """All parameters, tied ones once."""
        return sum(self.parameters.values())


def forward_flops(shape: DecoderShape, batch: int, length: int) -> float:
    """FLOPs of one forward pass over B x T positions."""
    n = batch * length
    total = 2.0 * n * shape.head_params
    for block in shape.blocks:
        total += 2.0 * n * block.matmul_params + 2.0 * n * length * block.attention_width
    return total


def backward_flops(shape: DecoderShape, batch: int, length: int) -> float:
    """FLOPs of one backward pass over B x T positions; below all that trains, nothing is spent."""
    n = batch * length
    trains_below = [shape.embedding_trains]
    for block in shape.blocks:
        trains_below.append(trains_below[-1] or block.trains)
    below_head = trains_below[-1] or shape.norm_trains
    total = 2.0 * n * shape.head_params * (below_head + shape.head_trains)
    for block, here in zip(shape.blocks, trains_below[1:], strict=True):
        if not here:
            continue
        total += 2.0 * n * (block.matmul_params + block.trained_matmul_params)
        total += 4.0 * n * length * block.attention_width
    return total


def train_flops(shape: DecoderShape, batch: int, length: int, *, recompute: bool = False) -> float:
    """FLOPs of forward and backward; with `recompute`, each block that passes gradients runs its
    forward twice."""
    total = forward_flops(shape, batch, length) + backward_flops(shape, batch, length)
    if recompute:
        n = batch * length
        passing = shape.embedding_trains
        for block in shape.blocks:
            passing = passing or block.trains
            if passing:
                total += 2.0 * n * block.matmul_params + 2.0 * n * length * block.attention_width
    return total


def flops_per_token(shape: DecoderShape, length: int, *, recompute: bool = False) -> float:
    """Training FLOPs of one token in a sequence of `length` tokens."""
    return train_flops(shape, 1, length, recompute=recompute) / length
