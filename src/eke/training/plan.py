"""What a run will take, before it is run: parameters, FLOPs, tokens, time, memory, checkpoints.

Pure arithmetic over a prepared run. The time is the FLOPs over a probed speed; memory is the
closed form of `footprint`; neither has been calibrated yet, so both are single figures. What a save
costs is expected from round figures of memory and disk, until the run measures it.
"""

from __future__ import annotations

from typing import Any

from eke.budget import Budget
from eke.budget.flops import flops_per_token
from eke.budget.units import parse_bytes, parse_duration
from eke.training.cadence import auto_interval, expected_save
from eke.training.config import Cadence, RunConfig
from eke.training.footprint import footprint, state_bytes
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
    pool = parse_bytes(config.checkpoint.pool, "checkpoint.pool")
    memory = footprint(
        shape, micro, compute_bytes=2 if config.model.dtype == "bf16" else 4, pool=pool
    )
    step_s = None
    if p.flops_per_s is not None:
        step_s = step_tokens * per_token / (p.flops_per_s * p.facts.world_size)
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
        "currency": budget.currency,
        "flops_per_s": p.flops_per_s,
        "memory_bytes": memory.terms(),
        "memory_total_bytes": memory.total,
        "checkpoint_bytes": state_bytes(shape),
        "checkpoint": _saves(config, state_bytes(shape), pool, step_s),
        "micro_tokens": micro,
        "step_tokens": step_tokens,
    }


def _saves(config: RunConfig, state: int, pool: int, step_s: float | None) -> dict[str, Any]:
    """What a save is expected to cost, and how often one comes."""
    stall_s, save_s = expected_save(state, pool, step_s)
    every = config.checkpoint.every
    interval_s: float | None
    if every == "auto":
        # What the run itself does before it has measured a save, where a step's time is unknown.
        cost_s = save_s if stall_s is None else stall_s
        mtbf_s = parse_duration(config.checkpoint.mtbf)
        interval_s = auto_interval(cost_s, mtbf_s, save_s=save_s).seconds
    else:
        cadence = Cadence.parse(every)
        interval_s = cadence.seconds
        if cadence.steps is not None and step_s is not None:
            interval_s = cadence.steps * step_s
    share = None if stall_s is None or not interval_s else stall_s / interval_s
    return {
        "pool_bytes": pool,
        "stall_s": stall_s,
        "save_s": save_s,
        "every": every,
        "interval_s": interval_s,
        "share": share,
    }
