"""What a run will take, before it is run: parameters, FLOPs, tokens, time, memory, checkpoints.

Pure arithmetic over a prepared run. The time is the FLOPs over a probed speed; memory is the
closed form of `footprint`; neither has been calibrated yet, so both are single figures.
"""

from __future__ import annotations

from typing import Any

from eke.budget import Budget
from eke.budget.flops import flops_per_token
from eke.training.footprint import footprint
from eke.training.resolve import expected_tokens
from eke.training.setup import Prepared


def plan_of(prepared: Prepared, budget: Budget) -> dict[str, Any]:
    """The plan as JSON values: see the module. Unknown figures are None."""
    p, shape, config = prepared, prepared.shape, prepared.config
    mean = max(2, round(sum(p.lengths) / len(p.lengths)))
    per_token = flops_per_token(shape, mean)
    unit, _, number = config.batch.per_step.partition(":")
    step_tokens = int(number) * (1 if unit == "tokens" else mean)
    tokens = expected_tokens(budget, p.facts)
    if budget.steps is not None:
        by_steps = float(budget.steps * step_tokens)
        tokens = by_steps if tokens is None else min(tokens, by_steps)
    flops = None if tokens is None else tokens * per_token
    seconds = None
    if flops is not None and p.flops_per_s is not None:
        seconds = flops / (p.flops_per_s * p.facts.world_size)
    micro = config.batch.micro_tokens
    assert isinstance(micro, int)
    memory = footprint(shape, micro, compute_bytes=2 if config.model.dtype == "bf16" else 4)
    money = None
    if seconds is not None and budget.price_per_hour is not None:
        money = seconds / 3600 * budget.price_per_hour
    return {
        "model": config.model.source,
        "parameters": shape.n_parameters,
        "parameters_by_group": shape.parameters,
        "trained_parameters": shape.trained_parameters,
        "corpus": p.corpus,
        "mean_length_tokens": mean,
        "flops_per_token": per_token,
        "limits": budget.limits(),
        "tokens": tokens,
        "steps": None if tokens is None else max(1, round(tokens / step_tokens)),
        "epochs": None if tokens is None else tokens / (mean * len(p.train)),
        "flops": flops,
        "seconds": seconds,
        "money": money,
        "flops_per_s": p.flops_per_s,
        "memory_bytes": memory.terms(),
        "memory_total_bytes": memory.total,
        "checkpoint_bytes": shape.n_parameters * 4 + shape.trained_parameters * 8,
        "micro_tokens": micro,
        "step_tokens": step_tokens,
    }
