"""`eke report RUN [RUN ...]`: write a run's report again, or compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="A run's directory; several to compare.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the page.")] = None,
) -> None:
    """Write a run's report.html again, or compare runs on one page."""
    from eke.report import compare, write_report

    if len(runs) == 1:
        path = write_report(runs[0], out=out)
    else:
        path = compare(runs, out or Path("comparison.html"))
    typer.echo(path)
