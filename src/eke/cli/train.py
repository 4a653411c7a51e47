"""`eke train run.toml`: run, or resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[Path, typer.Argument(help="The run's configuration (TOML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key: budget.flops=1e15."),
    ] = None,
) -> None:
    """Train; or resume, if the run's directory already holds a checkpoint.

    Exit code 3 means that a budget stopped the run: the model is finished all the same.
    """
    from eke.training.config import RunConfig

    loaded = RunConfig.load(config, overrides or [])

    from eke.cli.display import Display
    from eke.report import write_report
    from eke.training.trainer import Trainer

    main = os.environ.get("RANK", "0") == "0"
    with Display(every=loaded.log.every, quiet=not main) as display:
        result = Trainer(
            loaded, observer=display, last_words=write_report, whole_process=True
        ).train()
    if main:
        display.outcome(result)
    raise typer.Exit(result.exit_code)
