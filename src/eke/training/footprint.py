"""Memory of a training step in closed form, term by term (bytes on one rank).

Weights, gradients and AdamW's two moments are counted exactly. Activations use the usual count of
what a pre-norm block keeps for its backward pass without recomputation (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.1, with no score matrix because attention is fused), and the logits are
held as three fp32 copies (logits, log-softmax, their gradient). The runtime's own memory is what
a process with torch loaded holds before any model.
"""

from __future__ import annotations

from dataclasses import dataclass

from eke.budget.flops import DecoderShape

RUNTIME_BYTES = 400 * 2**20
"""Resident memory of Python with torch and transformers loaded (measured: 330 to 420 MiB)."""

LEAST_POOL_BYTES, MOST_POOL_BYTES = 2**20, 512 * 2**20
POOL_SHARE = 8
"""The pool that saves pass through is this part of the state, within these bounds."""

LEAST_MICRO_TOKENS = 64
"""Below this the machine is busy with overhead."""


@dataclass(frozen=True)
class Footprint:
    """Bytes by term."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    runtime: int
    pool: int = 0

    @property
    def total(self) -> int:
        """All terms at the end of the forward pass, where they are all alive."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.runtime
            + self.pool
        )

    def terms(self) -> dict[str, int]:
        """The terms by name."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "activations": self.activations,
            "logits and loss": self.logits,
            "runtime": self.runtime,
            "checkpoint pool": self.pool,
        }


def state_bytes(shape: DecoderShape) -> int:
    """What a checkpoint holds: fp32 weights, and AdamW's two moments of what is trained."""
    return shape.n_parameters * 4 + shape.trained_parameters * 8


def pool_bytes(state: int, room: int | None = None) -> int:
    """The pool for saving `state` bytes: an eighth of them, no more than there is `room` for, and
    between `LEAST_POOL_BYTES` and `MOST_POOL_BYTES`.

    A smaller pool costs time: training waits for the disk where a step is shorter than the copy.
    """
    wanted = min(MOST_POOL_BYTES, -(-state // POOL_SHARE))
    return max(LEAST_POOL_BYTES, wanted if room is None else min(wanted, room))


def footprint(
    shape: DecoderShape, micro_tokens: int, *, compute_bytes: int = 4, pool: int = 0
) -> Footprint:
    """The closed form for AdamW, everything trained or not as the shape says.

    Args:
        shape: the model.
        micro_tokens: positions of the largest micro-batch, padding included.
        compute_bytes: 4 for fp32, 2 for bf16 autocast.
        pool: what saving takes besides (bytes).
    """
    per_position = 0.0
    for block in shape.blocks:
        # Inputs of the linear layers, norms, the gated product and attention's q, k, v, output.
        inner = block.matmul_params / shape.hidden
        per_position += compute_bytes * (4 * shape.hidden + inner + block.attention_width)
    return Footprint(
        weights=shape.n_parameters * shape.bytes_per_parameter,
        gradients=shape.trained_parameters * shape.bytes_per_parameter,
        optimizer=2 * shape.trained_parameters * 4,
        activations=int(per_position * micro_tokens),
        logits=3 * 4 * shape.vocab * micro_tokens,
        runtime=RUNTIME_BYTES,
        pool=pool,
    )


def largest_micro_tokens(
    shape: DecoderShape,
    memory_bytes: int,
    *,
    compute_bytes: int = 4,
    most: int = 4096,
    pool: int = 0,
) -> int:
    """The largest of `most`, `most / 2`, `most / 4`, ... positions that fits; 0 when not even
    `LEAST_MICRO_TOKENS` would."""
    tokens = most
    while tokens >= LEAST_MICRO_TOKENS:
        need = footprint(shape, tokens, compute_bytes=compute_bytes, pool=pool).total
        if need <= memory_bytes:
            return tokens
        tokens //= 2
    return 0
