"""`eke doctor`: what this machine offers, and what will not work."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

Mark = Literal["ok", "warn", "fail"]
SYMBOLS = {"ok": "✓", "warn": "!", "fail": "✗"}
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
BAD_VERSIONS = {("lightning", "2.6.2"), ("lightning", "2.6.3")}
"""Releases that must not be installed (these two were published by an attacker)."""


@dataclass(frozen=True)
class Row:
    """One finding: a mark, what was found, the threshold, and what to do about it."""

    name: str
    mark: Mark
    value: str
    threshold: str = ""
    fix: str = ""


def doctor(
    directory: Annotated[Path, typer.Option("--dir", help="Where runs are to be kept.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check Python, packages, memory, disk, devices and counters. Exit code 1 if a row is ✗."""
    rows = examine(directory)
    if as_json:
        typer.echo(json.dumps({"ok": healthy(rows), "rows": [asdict(r) for r in rows]}, indent=1))
    else:
        show(rows)
    raise typer.Exit(0 if healthy(rows) else 1)


def healthy(rows: list[Row]) -> bool:
    """True when no row is ✗."""
    return all(row.mark != "fail" for row in rows)


def show(rows: list[Row]) -> None:
    """Print the rows."""
    width = max(len(r.name) for r in rows)
    for row in rows:
        typer.secho(f"{SYMBOLS[row.mark]} ", fg=COLOURS[row.mark], nl=False)
        threshold = f"  ({row.threshold})" if row.threshold else ""
        typer.echo(f"{row.name:<{width}}  {row.value}{threshold}")
        if row.mark != "ok" and row.fix:
            typer.echo(f"  {'':<{width}}  → {row.fix}")


def examine(directory: Path) -> list[Row]:
    """All checks, in the order in which a person would ask."""
    rows = [python_row(sys.version_info[:3])]
    rows += packages()
    rows += [memory_row(), threads_row(), load_row(os.getloadavg()[0], os.cpu_count() or 1)]
    rows += [device_row()]
    rows += disk_rows(directory)
    rows += [energy_row(), gloo_row()]
    return rows


def python_row(version: tuple[int, ...]) -> Row:
    """Python itself."""
    text = ".".join(map(str, version))
    good = version >= (3, 10)
    return Row(
        "python",
        "ok" if good else "fail",
        f"{text} on {platform.platform(terse=True)}",
        "3.10 or newer",
        "Install a newer Python",
    )


def version_of(package: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_row(package: str, version: str | None, *, needed: bool, purpose: str) -> Row:
    """One package: absent, known to be bad, or there."""
    if version is None:
        mark: Mark = "fail" if needed else "warn"
        fix = "pip install torch" if package == "torch" else "pip install 'eke[train]'"
        return Row(package, mark, "not installed", purpose, fix)
    if (package, version) in BAD_VERSIONS:
        return Row(
            package,
            "fail",
            version,
            "a malicious release",
            f"pip uninstall {package}, then look at what ran",
        )
    return Row(package, "ok", version)


def packages() -> list[Row]:
    """What eke is built on, and what only `eke train` needs."""
    rows = [package_row("torch", version_of("torch"), needed=True, purpose="needed by everything")]
    for name, purpose in (
        ("transformers", "eke train: models"),
        ("tokenizers", "eke train: built-in tokenizer"),
        ("pyarrow", "Parquet and datasets folders"),
        ("jinja2", "reports"),
        ("gguf", "GGUF models"),
        ("accelerate", "GGUF models"),
    ):
        rows.append(package_row(name, version_of(name), needed=False, purpose=purpose))
    lightning = version_of("lightning")
    if lightning is not None:
        rows.append(package_row("lightning", lightning, needed=False, purpose=""))
    return rows


def memory_row() -> Row:
    """Free memory against what the smallest model needs."""
    import psutil

    from eke.budget.units import format_bytes

    free = psutil.virtual_memory().available
    need = 2**30
    return Row(
        "memory",
        "ok" if free >= need else "fail",
        f"{format_bytes(free)} available",
        f"{format_bytes(need)} for builtin:tiny",
        "Close other programs",
    )


def threads_row() -> Row:
    """Cores, and how many threads torch will use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    asked = os.environ.get("OMP_NUM_THREADS")
    if asked is not None and asked.isdigit() and cores is not None and int(asked) > cores:
        return Row(
            "cores",
            "warn",
            f"{cores}, OMP_NUM_THREADS={asked}",
            "threads <= cores",
            "Unset OMP_NUM_THREADS: more threads than cores make steps slower",
        )
    return Row("cores", "ok", f"{cores}" + (f", OMP_NUM_THREADS={asked}" if asked else ""))


def load_row(load: float, cores: int) -> Row:
    """Whether other programs want the cores: torch's threads wait for one another, so that one
    foreign process makes two-thread steps several times slower (measured: four times)."""
    busy = load > 0.5 * cores
    return Row(
        "load",
        "warn" if busy else "ok",
        f"{load:.2f} over the last minute",
        f"{0.5 * cores:g} or less on {cores} cores",
        "Close other programs, or set OMP_NUM_THREADS to the cores that are left",
    )


def device_row() -> Row:
    """The accelerator, if torch sees one."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries
        return Row(
            "device", "fail", f"torch cannot be imported: {error}", "", "Install torch again"
        )

    if not torch.cuda.is_available():
        return Row("device", "ok", "cpu (no CUDA device)")
    from eke.budget.units import format_bytes

    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return Row(
        "device",
        "ok" if free > total / 2 else "warn",
        f"{name}, {format_bytes(free)} of {format_bytes(total)} free",
        "half of it free",
        "Another process holds its memory: see nvidia-smi",
    )


def disk_rows(directory: Path) -> list[Row]:
    """Space, and what a durable commit costs, where runs are to be kept."""
    from eke.budget.units import format_bytes, format_duration

    where = directory
    while not where.exists() and where != where.parent:
        where = where.parent
    free = shutil.disk_usage(where).free
    rows = [
        Row(
            "disk",
            "ok" if free > 5 * 2**30 else "warn",
            f"{format_bytes(free)} free in {where.resolve()}",
            "5 GiB: a checkpoint takes 12 bytes a parameter",
            "Free some space",
        )
    ]
    try:
        seconds = commit_seconds(where)
    except OSError as error:
        return [
            *rows,
            Row(
                "commit",
                "fail",
                f"cannot write there: {error.strerror}",
                "write, fsync, rename, fsync the folder",
                "Choose another --dir",
            ),
        ]
    mark: Mark = "ok" if seconds < 0.5 else "warn"
    return [
        *rows,
        Row(
            "commit",
            mark,
            format_duration(seconds),
            "write, fsync, rename, fsync the folder in under 0.5 s",
            "Slow storage: save less often (checkpoint.every)",
        ),
    ]


def commit_seconds(where: Path) -> float:
    """The median time of five durable commits of 4 KiB."""
    from eke.budget.files import fsync_dir

    taken = []
    with tempfile.TemporaryDirectory(dir=where, prefix=".eke-doctor-") as scratch:
        folder = Path(scratch)
        for i in range(5):
            started = time.perf_counter()
            path = folder / f"{i}.tmp"
            with path.open("wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            path.rename(folder / str(i))
            fsync_dir(folder)
            taken.append(time.perf_counter() - started)
    return sorted(taken)[2]


def energy_row() -> Row:
    """Whether joules can be counted."""
    from eke.budget.meters import EnergyMeter

    source = EnergyMeter.open().source
    if source == "unknown":
        return Row(
            "energy",
            "warn",
            "unknown: no counter",
            "NVML or readable RAPL",
            "budget.energy cannot be used here; joules will be reported as unknown",
        )
    return Row("energy", "ok", source)


def gloo_row(available: bool | None = None) -> Row:
    """Whether several ranks can talk."""
    if available is None:
        try:
            from eke.distributed import gloo_available
        except (ImportError, OSError) as error:
            return Row(
                "ranks", "fail", f"torch cannot be imported: {error}", "", "Install torch again"
            )
        available = gloo_available()
    if available:
        return Row("ranks", "ok", "gloo available")
    return Row(
        "ranks",
        "warn",
        "no gloo",
        "needed by torchrun",
        "Training works on one process; install a torch build with distributed support",
    )
