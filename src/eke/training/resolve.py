"""What `auto` becomes: pure arithmetic from a run's facts to a configuration without `auto`.

Properties: the result has no `auto` left, but for `POLICIES`; a key that the user set is never
changed; the same facts give the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eke.budget import Budget
from eke.budget.flops import DecoderShape, flops_per_token, forward_flops
from eke.budget.units import format_bytes, parse_bytes
from eke.errors import InputError
from eke.training.config import RunConfig
from eke.training.footprint import (
    LEAST_MICRO_TOKENS,
    LEAST_POOL_BYTES,
    footprint,
    largest_micro_tokens,
    pool_bytes,
    state_bytes,
)

WANTED_EVALUATIONS = 8
"""The governor needs a regression over [t/2, t] from 40 % of the budget on: about this many."""
MOST_MICRO_TOKENS = {"cpu": 512, "cuda": 16384}
"""More positions in one pass do not make it faster, and leave fewer ways to group by length."""
MEMORY_SHARE = 0.6
"""Without budget.memory, the share of the memory free at the start that a run may plan with."""

POLICIES = frozenset({("data", "format"), ("governor", "eval_every"), ("checkpoint", "every")})
"""Keys whose `auto` stays: it is decided row by row, or from what the run measures."""


@dataclass(frozen=True)
class Facts:
    """What is known about a run before its first step, the same on every rank.

    `lengths` is a sample of training lengths in tokens; `flops_per_s` is of one rank, comes from
    a probe and is None when no limit needs it; `free_bytes` is what one rank may take.
    """

    shape: DecoderShape
    lengths: Sequence[int]
    n_train: int
    n_eval: int
    world_size: int
    device: str
    from_scratch: bool
    free_bytes: int
    flops_per_s: float | None


def budget_of(config: RunConfig) -> Budget:
    """The budget's limits; one epoch where there are none."""
    budget = config.budget.parse()
    return budget if budget.limits() else replace(budget, epochs=1)


def expected_tokens(budget: Budget, facts: Facts) -> float | None:
    """Training tokens that the budget buys, or None when only `steps` limits the run."""
    mean = sum(facts.lengths) / len(facts.lengths)
    per_token = flops_per_token(facts.shape, max(1, round(mean)))
    seconds = budget.seconds
    if budget.money is not None and budget.price_per_hour:
        affordable = budget.money / budget.price_per_hour * 3600
        seconds = affordable if seconds is None else min(seconds, affordable)
    bounds = [
        budget.tokens,
        None if budget.flops is None else budget.flops / per_token,
        None if budget.epochs is None else budget.epochs * facts.n_train * mean,
        None
        if seconds is None or facts.flops_per_s is None
        else seconds * facts.flops_per_s * facts.world_size / per_token,
    ]
    known = [b for b in bounds if b is not None]
    return min(known) if known else None


def resolve(config: RunConfig, facts: Facts) -> RunConfig:
    """Fill in every `auto`.

    Raises:
        InputError: nothing fits into the memory limit.
    """
    budget = budget_of(config)
    values: dict[str, dict[str, Any]] = {}

    def setting(section: str, key: str, value: Any) -> None:
        if getattr(getattr(config, section), key) in ("auto", None):
            values.setdefault(section, {})[key] = value

    micro_tokens = _micro_tokens(config, budget, facts)
    setting("batch", "micro_tokens", micro_tokens)
    setting("checkpoint", "pool", _pool_bytes(config, budget, facts, micro_tokens))
    tokens = expected_tokens(budget, facts)
    per_step = _per_step(tokens, budget, facts)
    setting("batch", "per_step", f"tokens:{per_step}")
    setting("batch", "order_seed", config.run.seed)
    setting("data", "eval_examples", _eval_examples(tokens, config, facts))
    setting("optimizer", "lr", _learning_rate(facts))
    setting("optimizer", "warmup_steps", _warmup(tokens, per_step, budget))
    return config.with_values(values)


def _micro_tokens(config: RunConfig, budget: Budget, facts: Facts) -> int:
    """The most that fits and is of use, and at least the longest sample that was looked at.

    Raises:
        InputError: nothing fits into the memory limit, that sample does not, or what the user set
            does not fit into the limit that the user set.
    """
    compute_bytes = _compute_bytes(config)
    limit = _memory_limit(budget, facts)
    asked = config.batch.micro_tokens
    pools = _pools(config, facts)
    # The data's own lengths count, not data.max_length: that may be a context of 128 k tokens,
    # which no sample comes near.
    needed = max(LEAST_MICRO_TOKENS, *facts.lengths)
    most = max(MOST_MICRO_TOKENS[facts.device], 1 << (needed - 1).bit_length())
    fits = 0
    for pool in pools:  # a smaller one only where the longest sample would not fit beside it
        if fits < needed:
            fits = largest_micro_tokens(
                facts.shape, limit, compute_bytes=compute_bytes, most=most, pool=pool
            )

    def refuse(tokens: int, fix: str) -> InputError:
        need = footprint(facts.shape, tokens, compute_bytes=compute_bytes, pool=pools[-1]).total
        return InputError(
            "this model does not fit into the memory limit",
            value=format_bytes(limit),
            rule=f"weights, gradients, optimizer state, a checkpoint pool and {tokens:,} tokens at "
            f"once need about {format_bytes(need)}",
            fix=fix,
        )

    if isinstance(asked, int):
        if budget.memory_bytes is not None:
            need = footprint(facts.shape, asked, compute_bytes=compute_bytes, pool=pools[-1]).total
            if need > limit:
                lower = f"lower batch.micro_tokens to {fits}, or " if fits else ""
                raise refuse(asked, f"Raise budget.memory, {lower}choose a smaller model")
        return asked
    if fits == 0:
        raise refuse(LEAST_MICRO_TOKENS, "Raise budget.memory, or choose a smaller model")
    if fits < needed and budget.memory_bytes is not None:  # what is free is but a guess
        raise refuse(
            needed,
            f"Raise budget.memory, or set data.max_length to {fits} and data.overlength to "
            "truncate or skip",
        )
    return fits


def _compute_bytes(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bf16" else 4


def _memory_limit(budget: Budget, facts: Facts) -> int:
    return budget.memory_bytes or int(facts.free_bytes * MEMORY_SHARE)


def _pools(config: RunConfig, facts: Facts) -> tuple[int, ...]:
    """Pools to plan with: the wished one, then the least; only the one that the user set."""
    if config.checkpoint.pool != "auto":
        return (parse_bytes(config.checkpoint.pool, "checkpoint.pool"),)
    return pool_bytes(state_bytes(facts.shape)), LEAST_POOL_BYTES


def _pool_bytes(config: RunConfig, budget: Budget, facts: Facts, micro_tokens: int) -> int:
    """The wished pool, or what the micro-batches leave of the memory."""
    rest = footprint(facts.shape, micro_tokens, compute_bytes=_compute_bytes(config)).total
    return pool_bytes(state_bytes(facts.shape), _memory_limit(budget, facts) - rest)


def _per_step(tokens: float | None, budget: Budget, facts: Facts) -> int:
    """About 400 steps, at least 8 to an epoch, between 512 and 65,536 tokens, a multiple of 256."""
    epoch = sum(facts.lengths) / len(facts.lengths) * facts.n_train
    wish = 8192.0
    if tokens is not None:
        wish = tokens / (budget.steps or 400)
    wish = min(wish, epoch / 8, 65536.0)
    return max(512, round(wish / 256) * 256)


def _eval_examples(tokens: float | None, config: RunConfig, facts: Facts) -> int:
    """As many as there are (at most 512); fewer, down to 32, where even `WANTED_EVALUATIONS` of
    them would cost more than their share of the budget."""
    most = min(512, facts.n_eval)
    if tokens is None:
        return most
    mean = max(1, round(sum(facts.lengths) / len(facts.lengths)))
    one = forward_flops(facts.shape, 1, mean)
    allowed = config.governor.eval_share * tokens * flops_per_token(facts.shape, mean)
    return min(most, max(32, int(allowed / WANTED_EVALUATIONS / one)))


def _learning_rate(facts: Facts) -> float:
    """From scratch: 1e-3 at width 192, falling with the root of the width. Fine-tuning: 2e-5 at
    7 B parameters, rising with the root of the size, at most 2e-4."""
    if facts.from_scratch:
        return float(f"{1e-3 * math.sqrt(192 / facts.shape.hidden):.3g}")
    return float(f"{min(2e-4, 2e-5 * math.sqrt(7e9 / facts.shape.n_parameters)):.3g}")


def _warmup(tokens: float | None, per_step: int, budget: Budget) -> int:
    """5 % of the expected steps, between 1 and 100."""
    bounds = (budget.steps, None if tokens is None else tokens / per_step)
    steps = min((b for b in bounds if b is not None), default=1000)
    return min(100, max(1, round(steps * 0.05)))
