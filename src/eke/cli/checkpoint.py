"""`eke checkpoint`: look at checkpoints on disk. Nothing is unpickled, and torch is not loaded.

Exit codes of `verify`: 0 every byte is the one that was written; 1 corrupt (bytes are there and
wrong); 4 incomplete (a file, its end, or the manifest is not there); 5 foreign (not a checkpoint
of this version of eke, or files that no manifest lists). With several problems the first of
1, 4, 5 that applies.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eke.checkpoint.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

EXIT_CODES = {None: 0, "corrupt": 1, "incomplete": 4, "foreign": 5}

app = typer.Typer(
    help="List, inspect, verify and compare checkpoints; never unpickles anything.",
    no_args_is_help=True,
)

PathArgument = Annotated[
    Path, typer.Argument(help="A run, its checkpoints directory, or one step's directory.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _amount(count: float) -> str:
    """Bytes for a reader: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        numeric = column in ("step", "size", "age")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table


def _print(item: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160  # a pipe has no width to wrap at
    console.print(item)


@app.command("ls")
def list_steps(path: PathArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run, with damaged ones and what crashes left behind."""
    from eke.checkpoint import overview

    rows = overview(path)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo(f"no checkpoints in {path}")
        return
    table = _table("step", "status", "size", "age", "directory")
    for row in rows:
        table.add_row(
            str(row["step"]),
            row["status"] if row["problem"] is None else f"{row['status']}: {row['problem']}",
            _amount(row["bytes"]),
            _age(row["age_s"]),
            printable(row["name"]),
        )
    _print(table)


@app.command("inspect")
def inspect_step(path: PathArgument, as_json: JsonOption = False) -> None:
    """Show what one checkpoint holds (of a run: its newest): providers, tensors, hashes.

    The text has the first 12 digits of each hash; --json has all of them.
    """
    from eke.checkpoint import inspect

    facts = inspect(path)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["created_unix_s"]))
    versions = f"eke {printable(facts['eke'], 40)}, torch {printable(facts['torch'], 40)}"
    typer.echo(
        f"{printable(facts['path'])}\n"
        f"step {facts['step']}, saved {made} by {facts['world_size']} rank(s), "
        f"{_amount(facts['bytes'])}; {versions}"
    )
    for name, provider in facts["providers"].items():
        tensors = provider["tensors"]
        own = ", each rank its own" if provider["per_rank"] else ""
        typer.echo(
            f"\n{printable(name)}: {len(tensors)} tensor(s), {_amount(provider['bytes'])}{own}"
        )
        if tensors:
            _print(_tensors_table(tensors))


def _tensors_table(tensors: dict[str, Any]) -> Table:
    table = _table("tensor", "dtype", "shape", "size", "group", "xxh3-128")
    for key, tensor in tensors.items():
        hashes = [shard["xxh3_128"] for shard in tensor["shards"]]
        what = hashes[0][:12] if len(hashes) == 1 else f"{len(hashes)} shards"
        if tensor["alias_of"] is not None:
            what = f"is {printable(tensor['alias_of'])}"
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        size = _amount(tensor["bytes"])
        group = printable(tensor["group"])
        table.add_row(printable(key), tensor["dtype"], shape, size, group, what)
    return table


@app.command("verify")
def verify_steps(path: PathArgument, as_json: JsonOption = False) -> None:
    """Read every byte and compare it with its hash: of one checkpoint, or of all of a run.

    Exit codes: 0 sound, 1 corrupt, 4 incomplete, 5 foreign.
    """
    from eke.checkpoint import verify
    from eke.checkpoint.errors import reading, worst
    from eke.checkpoint.layout import root_of, step_dirs

    with reading(path):
        found = step_dirs(root_of(path)).values()
    reports = [verify(one) for one in found] or [verify(path)]
    problems = [problem for report in reports for problem in report.problems]
    if as_json:
        typer.echo(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        for report in reports:
            if report.ok:
                typer.echo(f"{report.path}: sound ({_amount(report.bytes_read)} read)")
            else:
                typer.echo(f"{report.path}: {report.kind}")
            for problem in report.problems:
                typer.echo(f"  {problem.kind}: {problem}")
    raise typer.Exit(EXIT_CODES[worst(problems) if problems else None])


@app.command("diff")
def diff_steps(
    a: PathArgument,
    b: PathArgument,
    everything: Annotated[bool, typer.Option("--all", help="Show what is the same too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints tensor by tensor. Exit codes: 0 the same, 1 different."""
    from eke.checkpoint import diff

    rows = diff(a, b)
    different = [row for row in rows if row["status"] != "same"]
    if as_json:
        typer.echo(json.dumps(rows if everything else different, indent=2))
    else:
        shown = rows if everything else different
        if shown:
            table = _table("tensor", "status", "size")
            for row in shown:
                table.add_row(printable(row["tensor"]), row["status"], _amount(row["bytes"]))
            _print(table)
        same = len(rows) - len(different)
        typer.echo(f"{len(different)} tensor(s) differ, {same} are the same")
    raise typer.Exit(1 if different else 0)


@app.command("gc")
def collect_garbage(
    path: Annotated[Path, typer.Argument(help="A run or its checkpoints directory.")],
    keep_last: Annotated[
        int | None,
        typer.Option(help="Also delete checkpoints but for the newest so many."),
    ] = None,
) -> None:
    """Remove what crashes left behind; what a living process works on stays."""
    from eke.checkpoint import Keep, collect

    removed = collect(path, None if keep_last is None else Keep(last=keep_last))
    for one in removed:
        typer.echo(f"removed {one}")
    if not removed:
        typer.echo(f"nothing to remove in {path}")


@app.command("export")
def export_step(
    path: PathArgument,
    directory: Annotated[
        Path, typer.Argument(help="The new directory; it must not exist, or be empty.")
    ],
    to: Annotated[
        str,
        typer.Option(
            help="hf: a folder for from_pretrained; dcp: for torch.distributed.checkpoint.load; "
            "torch: one file for torch.load(weights_only=True)."
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="hf: the folder with config.json and tokenizer; a run has its own."),
    ] = None,
) -> None:
    """Write one checkpoint (of a run: its newest) in another format, every hash checked."""
    import tempfile

    from eke.checkpoint.exporting import check_target, export
    from eke.checkpoint.layout import checkpoint_of

    check_target(directory)
    run = checkpoint_of(path).absolute().parent.parent
    unfinished = (run / "run.toml").is_file() and not (run / "model" / "config.json").is_file()
    with tempfile.TemporaryDirectory() as scratch:
        if to == "hf" and config is None and unfinished:
            from eke.training.describe import describe_model

            config = Path(scratch)
            describe_model(run / "run.toml", config)
        export(path, directory, to=to, config=config)  # type: ignore[arg-type]
    typer.echo(f"exported {checkpoint_of(path)} to {directory}")
