"""The `eke` command: one file a command, errors as one paragraph, exit codes that mean something.

Exit codes: 0 done, 1 failed, 2 bad input, 3 stopped by its budget with a finished model, 130
interrupted after a checkpoint. Nothing here imports torch, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any

import typer

from eke.checkpoint.errors import printable
from eke.cli import checkpoint, demo, doctor, plan, report, train
from eke.errors import EkeError
from eke.version import __version__

# Newer releases of typer bring their own copy of click and export only some of its errors.
_ClickException: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

app = typer.Typer(
    name="eke",
    help="Train language models inside a budget that you state.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eke {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train language models inside a budget that you state."""


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("report")(report.report)
app.add_typer(checkpoint.app, name="checkpoint")


def main() -> None:
    """Run the command line, and exit."""
    debug = "--debug" in sys.argv
    if debug:  # wherever it stands: people add it at the end of the line that failed
        sys.argv.remove("--debug")
    try:
        code = app(prog_name="eke", standalone_mode=False)
    except EkeError as error:
        if debug:
            traceback.print_exc()
        else:
            _complain(str(error))
        code = error.exit_code
    except _ClickException as error:
        _usage(error)
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        _complain("interrupted")
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> None:
    """A command line that cannot be read; a group without a command answers with its help."""
    message = error.format_message()
    if message.startswith("Usage:"):
        typer.echo(message, err=True)
        return
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f" See: {context.command_path} --help"
    _complain(f"{message.rstrip('.')}.{hint}")


def _complain(message: str) -> None:
    # Names from files may be in it: they shall not steer the terminal.
    shown = "\n".join(printable(line, 10_000) for line in message.split("\n"))
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(shown, err=True)
