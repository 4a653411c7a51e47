"""The picture of how full and even micro-batches of real text are, and what that buys: from the
last run in `results/batching_throughput.csv`. `batched` and `paired` are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.batching_claims import (
    EKE,
    EKE_PACKED,
    FIXED_BATCHES,
    GROUPED,
    LHOTSE,
    ODB,
    REBALANCE,
    STAYS,
    TEXTS,
    THROUGHPUT,
    TRL,
)
from benchmarks.chart import OUT, WIDTH, Panel, Row, picture, read
from eke.report.svg import line, rect, title, words

BATCHED_OUT = OUT.with_name("batching-benchmark.svg")
HEADING = "Micro-batches of real text: how full, how even, how fast"
PANELS = (
    Panel(THROUGHPUT, "padding", "Padding", "of computed tokens; less is better"),
    Panel(THROUGHPUT, "efficiency", "Efficiency", "real / slowest rank's tokens"),
    Panel(THROUGHPUT, "labels", "Labels a second", "times those of fixed batches"),
)
SHOWN_AS = {"pydocs": "Python's documentation", "chitchat": "conversations (chitchat-dataset)"}
ARMS = (EKE, EKE_PACKED, STAYS, ODB, LHOTSE, REBALANCE, GROUPED, TRL, FIXED_BATCHES)
CALLED = {EKE: "eke, padded", TRL: "TRL packing (bfd)"}
BAR, ROW, TOP, LABELS, GAP, VALUE = 12.0, 32.0, 92.0, 176.0, 16.0, 48.0
FAINT = "svg.chart .bar.second { opacity: .5; }"

Found = Mapping[Panel, Mapping[str, Mapping[str, float]]]
"""Panel -> text -> arm -> figure."""


def batched(rows: Sequence[Row]) -> dict[Panel, dict[str, dict[str, float]]]:
    """The medians of each text; labels a second as multiples of the fixed batches'.

    Args:
        rows: one run of `batching_throughput.csv`; other workloads and failures are left out.
    """
    found: dict[Panel, dict[str, dict[str, float]]] = {}
    for panel in PANELS:
        for name in TEXTS:
            values = {
                row["arm"]: float(row["median"])
                for row in rows
                if (row["workload"], row["metric"]) == (name, panel.metric) and row["arm"] in ARMS
            }
            if panel.metric == "labels":
                base = values.get(FIXED_BATCHES)
                values = {arm: value / base for arm, value in values.items()} if base else {}
            found.setdefault(panel, {})[name] = values
    return found


def shown(panel: Panel, value: float) -> str:
    """The figure as text."""
    return f"{value:.2f} ×" if panel.metric == "labels" else f"{100 * value:.1f} %"


def paired(found: Found, footer: str) -> str:
    """An SVG document, in light and in dark: a row for each arm, a bar for each text."""
    height = int(TOP + ROW * len(ARMS) + 34)
    column = (WIDTH - LABELS - 8.0) / len(found)
    out = [words(8, 20, HEADING, "strong")]
    x = 8.0
    for place, name in enumerate(TEXTS):
        kind = "" if place == 0 else " second"
        out.append(rect(x, 32, 18, BAR / 2, f"bar train{kind}"))
        out.append(rect(x, 32 + BAR / 2, 18, BAR / 2, f"bar startup{kind}"))
        out.append(words(x + 24, 42, SHOWN_AS[name], "small"))
        x += 190.0
    for number, arm in enumerate(ARMS):
        y = TOP + ROW * number + 19.0
        kind = "strong" if arm.startswith("eke") else "t"
        out.append(words(LABELS - 8, y, CALLED.get(arm, arm), kind, "end"))
    for place, (panel, texts) in enumerate(found.items()):
        x = LABELS + place * column
        most = max([value for values in texts.values() for value in values.values()] or [1.0])
        room = (column - GAP - VALUE) / max(most, 1e-12)
        out += [words(x, 70, panel.heading, "strong"), words(x, 84, panel.note, "small")]
        bottom = TOP + ROW * len(ARMS)
        if panel.metric == "labels":
            out.append(line(x + room, TOP, x + room, bottom, "grid dashed"))
        out.append(line(x, TOP, x, bottom, "axis"))
        for number, arm in enumerate(ARMS):
            for below, name in enumerate(TEXTS):
                y = TOP + ROW * number + 4 + BAR * below
                value = texts[name].get(arm)
                if value is None:
                    out.append(words(x + 5, y + BAR - 2, "–", "value small"))
                    continue
                said = shown(panel, value)
                kind = "train" if arm.startswith("eke") else "startup"
                kind = f"bar {kind}" + (" second" if below else "")
                tip = title(f"{CALLED.get(arm, arm)}, {SHOWN_AS[name]}: {said}")
                # Half a pixel at least, so that next to nothing can be seen.
                length = max(room * value, 0.5)
                out.append(rect(x, y, length, BAR - 1, kind, tip))
                out.append(words(x + length + 5, y + BAR - 2, said, "value small"))
    out.append(words(8, height - 10, footer, "small"))
    described = "; ".join(
        f"{panel.heading.lower()}, {SHOWN_AS[name]}: "
        + ", ".join(f"{CALLED.get(a, a)} {shown(panel, v)}" for a, v in values.items())
        for panel, texts in found.items()
        for name, values in texts.items()
        if values
    )
    return picture(HEADING, height, described, out, FAINT)


def draw_batching() -> Path:
    """From the last run on real text; returns where it is."""
    rows = read(THROUGHPUT, TEXTS)
    rounds = max(int(row["n"]) for row in rows)
    footer = (
        "Two gloo ranks on a CPU, a small transformer, the same cap on every micro-batch; "
        f"medians of {rounds} rounds; {rows[-1]['date'][:10]}"
    )
    BATCHED_OUT.parent.mkdir(parents=True, exist_ok=True)
    BATCHED_OUT.write_text(paired(batched(rows), footer))
    return BATCHED_OUT
