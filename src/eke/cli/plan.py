"""`eke plan run.toml`: what a run will take, before any weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def plan(
    config: Annotated[Path, typer.Argument(help="The run's configuration (TOML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key: budget.flops=1e15."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a run will take: parameters, FLOPs, tokens, time, memory by term, checkpoints.

    Loads no weights: the time comes from a short probe of one and two blocks of the model.
    """
    from eke.training.config import RunConfig

    loaded = RunConfig.load(config, overrides or [])

    from eke.training.plan import plan_of
    from eke.training.resolve import budget_of
    from eke.training.setup import prepare

    prepared = prepare(loaded, weights=False)
    quote = plan_of(prepared, budget_of(prepared.config))
    if as_json:
        typer.echo(json.dumps(quote, indent=1))
        return
    for line in describe(quote):
        typer.echo(line)


def describe(quote: dict[str, Any]) -> list[str]:
    """The plan as aligned lines of text."""
    from eke.budget.units import format_bytes, format_count, format_duration

    def known(value: float | None, show: Any) -> str:
        return "unknown" if value is None else f"about {show(value)}"

    limits = ", ".join(f"{u} {format_count(v)}" for u, v in quote["limits"].items())
    rows = [
        ("model", f"{quote['model']}, {format_count(quote['parameters'])} parameters"),
        (
            "data",
            f"{quote['corpus']['name']}, {quote['corpus']['train']:,} samples to train on, "
            f"{quote['corpus']['eval']} held out, mean {quote['mean_length_tokens']} tokens",
        ),
        ("limits", limits),
        ("FLOPs a token", format_count(quote["flops_per_token"])),
        ("tokens", known(quote["tokens"], format_count)),
        ("epochs", known(quote["epochs"], lambda x: f"{x:.2f}")),
        ("steps", known(quote["steps"], lambda x: f"{x:,} of {quote['step_tokens']:,} tokens")),
        ("FLOPs", known(quote["flops"], format_count)),
        ("speed", known(quote["flops_per_s"], lambda x: format_count(x, "FLOP/s"))),
        ("time", known(quote["seconds"], format_duration)),
        ("checkpoint", format_bytes(quote["checkpoint_bytes"])),
        ("saves", _saves(quote["checkpoint"])),
        (
            "memory",
            f"{format_bytes(quote['memory_total_bytes'])} with micro-batches of "
            f"{quote['micro_tokens']:,} tokens (closed form)",
        ),
        *((f"  {term}", format_bytes(n)) for term, n in quote["memory_bytes"].items()),
    ]
    if quote["money"] is not None:
        cost = f"about {quote['money']:,.2f} {quote['currency'] or ''}".rstrip()
        rows.insert([name for name, _ in rows].index("checkpoint"), ("cost", cost))
    return [f"{name:<20}{value}" for name, value in rows]


def _saves(saves: dict[str, Any]) -> str:
    from eke.budget.units import format_duration

    every, interval_s, stall_s = saves["every"], saves["interval_s"], saves["stall_s"]
    text = f"every {every}" if every != "auto" else f"about every {format_duration(interval_s)}"
    if every != "auto" and interval_s is not None and every[-1].isalpha() and "step" in every:
        text += f" (about {format_duration(interval_s)})"
    if stall_s is None:
        return f"{text}, until a save is measured"
    text += f", training waits about {format_duration(stall_s)} for each"
    return text if saves["share"] is None else f"{text} ({100 * saves['share']:.2g} % of the time)"
