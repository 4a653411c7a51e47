"""Pictures of the committed results: what a checkpoint of W1 costs with eke and with its peers, and
(`batching_chart`) how full and even micro-batches are.

`python -m benchmarks.chart` draws `docs/images/checkpoint-benchmark.svg` from the last run in
`results/`, `python -m benchmarks.chart batching` `docs/images/batching-benchmark.svg`. `drawn` and
`last_run` are pure.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claims import KEPT
from benchmarks.harness import RESULTS
from eke.report import text
from eke.report.render import TEMPLATES
from eke.report.svg import el, figure, line, rect, title, words

OUT = Path(__file__).parent.parent / "docs" / "images" / "checkpoint-benchmark.svg"
HEADING = "What a checkpoint costs"
WIDTH, ROW, TOP, LABELS, GAP = 860, 24, 66, 176.0, 18.0
Row = Mapping[str, str]


@dataclass(frozen=True)
class Panel:
    """One column of bars: which figure of which benchmark, and how it is called."""

    script: str
    metric: str
    heading: str
    note: str

    def shown(self, value: float) -> str:
        """The figure as text."""
        if self.metric == "memory":
            return text.share(value)
        return f"{value:.2g}" if self.metric == "cpu" else text.duration(value)


PANELS = (
    Panel("checkpoint_training", "stall", "Training waits", "per checkpoint"),
    Panel("checkpoint_save", "durable", "Durable after", "fsync included"),
    Panel("checkpoint_save", "cpu", "CPU seconds", "per GiB saved"),
    Panel("checkpoint_save", "memory", "Extra memory", "of the state's size"),
)
ARMS = (
    "eke",
    "torch.save",
    "safetensors",
    KEPT,
    "dcp.async_save, process",
    "torch_checkpointing",
    "torchsnapshot, async",
    "lightning, async",
)


def _is_ours(arm: str) -> bool:
    return arm == "eke" or arm.startswith("eke,")


def last_run(rows: Sequence[Row]) -> list[Row]:
    """The rows that were written together with the last one."""
    return [row for row in rows if row["date"] == rows[-1]["date"]] if rows else []


def medians(rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Arm -> its median on W1."""
    return {
        row["arm"]: float(row["median"])
        for row in rows
        if row["workload"] == "W1" and row["metric"] == metric
    }


def drawn(
    found: Mapping[Panel, Mapping[str, float]],
    footer: str,
) -> str:
    """An SVG document, in light and in dark.

    Args:
        found: for each panel, arm -> figure; an arm without one gets a dash.
    """
    height = TOP + ROW * len(ARMS) + 34
    column = (WIDTH - LABELS - 8.0) / len(found)
    out = [words(8, 20, f"{HEADING} (the shorter, the better)", "strong")]
    for number, arm in enumerate(ARMS):
        y = TOP + ROW * number + 15.0
        out.append(words(LABELS - 8, y, arm, "strong" if _is_ours(arm) else "t", "end"))
    for place, (panel, values) in enumerate(found.items()):
        x = LABELS + place * column
        most = max([*values.values(), 1e-12])
        room = column - GAP - 52.0
        out += [words(x, 44, panel.heading, "strong"), words(x, 58, panel.note, "small")]
        out.append(line(x, TOP - 2, x, TOP + ROW * len(ARMS), "axis"))
        for number, arm in enumerate(ARMS):
            y = float(TOP + ROW * number)
            if arm not in values:
                out.append(words(x + 5, y + 15, "–", "value"))
                continue
            shown, length = panel.shown(values[arm]), room * max(0.0, values[arm]) / most
            kind = "bar train" if _is_ours(arm) else "bar startup"
            # Half a pixel at least, so that next to nothing can be seen.
            out.append(rect(x, y + 3, max(length, 0.5), ROW - 8, kind, title(f"{arm}: {shown}")))
            out.append(words(x + max(length, 0.5) + 5, y + 15, shown, "value"))
    out.append(words(8, height - 10, footer, "small"))
    described = "; ".join(
        f"{p.heading.lower()}: "
        + ", ".join(f"{arm} {p.shown(found[p][arm])}" for arm in ARMS if arm in found[p])
        for p in found
    )
    return picture(HEADING, height, described, out)


def picture(
    heading: str, height: int, described: str, parts: Sequence[str], style: str = ""
) -> str:
    """Parts on a card, with the report's colours and `style` besides."""
    css = (TEMPLATES / "chart.css").read_text("utf-8") + style
    card = el("style", css) + rect(0, 0, WIDTH, height, "card")
    whole = figure("bench", WIDTH, height, heading, f"{described}.", card, *parts)
    return whole.replace("<svg ", f'<svg width="{WIDTH}" height="{height}" ', 1) + "\n"


def read(script: str, workloads: Sequence[str] = ()) -> list[Row]:
    """The last run of one benchmark, from its CSV file; of these workloads, if any are given."""
    with (RESULTS / f"{script}.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if not workloads or r["workload"] in workloads]
    return last_run(rows)


def main() -> None:
    if sys.argv[1:] == ["batching"]:
        from benchmarks.batching_chart import draw_batching  # it draws with what is here

        print(draw_batching())
        return
    runs = {script: read(script) for script in {panel.script for panel in PANELS}}
    about = runs["checkpoint_save"][-1]
    footer = (
        f"A GPT-like state of 1.25 GB with AdamW, scale {float(about['scale']):g}; medians; "
        f"{about['cores']} cores of {about['cpu']}; torch {about['torch']}; {about['date'][:10]}"
    )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(drawn({p: medians(runs[p.script], p.metric) for p in PANELS}, footer))
    print(OUT)


if __name__ == "__main__":
    main()
