"""What `eke train` shows: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from eke.budget.units import format_bytes, format_count, format_duration

SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as a line of block characters; what is not finite is left out."""
    tail = [v for v in values[-width:] if math.isfinite(v)]
    if not tail:
        return ""
    low, high = min(tail), max(tail)
    span = (high - low) or 1.0
    return "".join(SPARKS[min(7, int((v - low) / span * 8))] for v in tail)


class Display:
    """An observer of a run. Use it as a context manager."""

    def __init__(
        self, *, every: int = 10, quiet: bool = False, console: Console | None = None
    ) -> None:
        self._console = console or Console(highlight=False)
        self._every, self._quiet = every, quiet
        self._live: Live | None = None
        self._step: dict[str, Any] = {}
        self._losses: list[float] = []
        self._eval: float | None = None
        self._started = time.monotonic()

    def __enter__(self) -> Display:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(
                self._panel(), console=self._console, refresh_per_second=4, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take a record of `metrics.jsonl` or `decisions.jsonl`, or a word about progress."""
        if self._quiet:
            return
        kind = record.get("kind")
        if kind == "step":
            self._step = dict(record)
            if record["loss"] is not None:
                self._losses.append(record["loss"])
            if self._live is None and record["step"] % self._every == 0:
                self._print(self._line(record))
        elif kind == "eval":
            self._eval = record["loss"]
            label = "finished model" if record["finished"] else f"step {record['step']:>6}"
            self._print(f"{label}  held-out loss {record['loss']:.4f} ± {record['se']:.4f}")
        elif kind == "decision" and record["action"] != "continue":
            self._print(f"step {record['step']:>6}  {record['action']}: {record['reason']}")
        elif kind == "say":
            self._print(f"· {record['text']}")
        if self._live is not None:
            self._live.update(self._panel())

    def _print(self, text: str) -> None:
        try:
            self._console.print(text, markup=False, soft_wrap=self._live is None)
        except (OSError, SystemExit):  # rich ends the process at a closed pipe: a run is worth more
            self._quiet = True

    @staticmethod
    def _line(r: Mapping[str, Any]) -> str:
        loss = "   none" if r["loss"] is None else f"{r['loss']:7.4f}"
        padding = 1 - r["tokens"] / max(1, r["padded_tokens"])
        return (
            f"step {r['step']:>6}  loss {loss}  lr {r['lr']:.2e}  "
            f"{format_count(r['tokens_per_s'])} tokens/s  padding {padding:.0%}  "
            f"memory {format_bytes(r['rss_bytes'])}  budget {r['budget_used']:.0%}"
        )

    def _panel(self) -> Table:
        table = Table.grid(padding=(0, 2))
        r = self._step
        if not r:
            table.add_row("starting", f"{time.monotonic() - self._started:.0f} s")
            return table
        loss = "none" if r["loss"] is None else f"{r['loss']:.4f}"
        held_out = "" if self._eval is None else f"held out {self._eval:.4f}"
        table.add_row(f"step {r['step']}", f"epoch {r['epoch']}", r["phase"], f"lr {r['lr']:.2e}")
        table.add_row(f"loss {loss}", held_out, sparkline(self._losses))
        table.add_row(
            f"{format_count(r['tokens_per_s'])} tokens/s",
            f"padding {1 - r['tokens'] / max(1, r['padded_tokens']):.0%}",
            f"memory {format_bytes(r['rss_bytes'])}",
        )
        filled = round(40 * min(1.0, r["budget_used"]))
        table.add_row("budget", f"{r['budget_used']:.1%}", "█" * filled + "░" * (40 - filled))
        return table

    def outcome(self, result: Any) -> None:
        """The last lines of a run."""
        if not result.trained:
            self._print(f"This run is finished already ({result.reason}).")
        elif result.state == "finished":
            loss = "" if result.loss is None else f", held-out loss {result.loss:.4f}"
            took = format_duration(time.monotonic() - self._started)
            self._print(f"Done after {result.step} steps{loss}: {result.reason} ({took}).")
        else:
            self._print(f"Interrupted: {result.reason}. The same command goes on from here.")
        for name, path in (("model", "model"), ("report", "report.html")):
            if result.state == "finished" and (result.run_dir / path).exists():
                self._print(f"{name:<8}{result.run_dir / path}")
