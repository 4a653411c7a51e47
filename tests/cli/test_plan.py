"""`eke plan`: as lines of text from a quote, and for a real configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eke.cli.plan import describe

QUOTE: dict[str, Any] = {
    "model": "builtin:tiny",
    "parameters": 3_000_384,
    "corpus": {"name": "text.jsonl", "train": 5400, "eval": 256},
    "mean_length_tokens": 48,
    "flops_per_token": 16_600_000.0,
    "limits": {"flops": 3e10, "seconds": 5400.0},
    "tokens": 1810.0,
    "steps": 9,
    "step_tokens": 2048,
    "epochs": 0.7,
    "flops": 3e10,
    "seconds": 3720.0,
    "money": None,
    "flops_per_s": 5.77e10,
    "memory_bytes": {"weights": 12 * 2**20, "gradients": 2**30},
    "memory_total_bytes": 1.5 * 2**30,
    "checkpoint_bytes": 36 * 2**20,
    "checkpoint": {
        "pool_bytes": 2**20,
        "stall_s": 0.005,
        "save_s": 0.2,
        "every": "auto",
        "interval_s": 12.0,
        "share": 0.00042,
    },
    "currency": None,
    "micro_tokens": 1024,
}


def test_every_figure_has_its_line() -> None:
    assert describe(QUOTE) == [
        "model               builtin:tiny, 3 M parameters",
        "data                text.jsonl, 5,400 samples to train on, 256 held out, mean 48 tokens",
        "limits              flops 30 G, seconds 5.4 k",
        "FLOPs a token       16.6 M",
        "tokens              about 1.81 k",
        "epochs              about 0.70",
        "steps               about 9 of 2,048 tokens",
        "FLOPs               about 30 G",
        "speed               about 57.7 GFLOP/s",
        "time                about 1h02m",
        "checkpoint          36 MiB",
        "saves               about every 12.0s, training waits about 5ms for each "
        "(0.042 % of the time)",
        "memory              1.5 GiB with micro-batches of 1,024 tokens (closed form)",
        "  weights           12 MiB",
        "  gradients         1 GiB",
    ]


@pytest.mark.parametrize("name", ["tokens", "epochs", "steps", "flops", "seconds", "flops_per_s"])
def test_what_is_unknown_is_called_so(name: str) -> None:
    lines = describe({**QUOTE, name: None})
    assert [line.split(" ", 1)[1].strip() for line in lines if "unknown" in line] == ["unknown"]


def test_money_comes_after_the_time_that_it_is_made_of() -> None:
    lines = describe({**QUOTE, "money": 1234.5, "currency": "USD"})
    names = [line.split("  ")[0] for line in lines]
    assert names.index("cost") == names.index("time") + 1
    assert "cost                about 1,234.50 USD" in lines


@pytest.mark.parametrize(
    ("saves", "text"),
    [
        ({"every": "50 steps", "interval_s": 75.0}, "every 50 steps (about 1m15s), training waits"),
        ({"every": "2m", "interval_s": 120.0}, "every 2m, training waits about 5ms"),
        ({"every": "9 steps", "interval_s": None, "stall_s": None, "share": None},
         "every 9 steps, until a save is measured"),
    ],
)  # fmt: skip
def test_how_often_it_saves(saves: dict[str, Any], text: str) -> None:
    quote = {**QUOTE, "checkpoint": {**QUOTE["checkpoint"], **saves}}
    (line,) = (line for line in describe(quote) if line.startswith("saves"))
    assert text in line


def test_a_real_plan_as_json_and_text(eke_process: Callable[..., Any], workplace: Path) -> None:
    ended = eke_process("plan", "run.toml", "--json", cwd=workplace)
    assert ended.code == 0, ended
    quote = json.loads(ended.out)
    assert quote["limits"] == {"flops": 3e10}
    assert quote["model"] == "builtin:tiny"
    assert quote["corpus"]["train"] + quote["corpus"]["eval"] <= 60
    assert quote["flops"] == pytest.approx(3e10)
    assert quote["flops_per_s"] > 0
    assert quote["memory_total_bytes"] == sum(quote["memory_bytes"].values())
    assert not (workplace / "small").exists() or (workplace / "small" / "status.json").exists()
    assert len(describe(quote)) >= 12


def test_an_override_that_cannot_be_read(eke: Callable[..., Any], workplace: Path) -> None:
    for bad, words in (
        ("budget.flops", "cannot read an override"),
        ("budget.flops=lots", "budget.flops"),
        ("budget.flopz=1", "Did you mean 'flops'?"),
    ):
        ended = eke("plan", workplace / "run.toml", "--set", bad)
        assert ended.code == 2
        assert words in ended.err
