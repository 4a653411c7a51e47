"""`eke demo`: the whole story on a CPU in a minute or two.

Trains `builtin:tiny` on the documentation of this very Python under a FLOP budget, kills the
training process with SIGKILL in the middle of a save, resumes it, and compares its losses with
those of a run that nobody killed. Nothing is staged: the processes are real, the comparison is of
every bit, and when it fails the command fails.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from eke.budget.units import parse_flops
from eke.errors import EkeError, InputError

KILL_AFTER_SAVES = 2
COMPARED_STEPS = 12
ATTEMPTS = 3
"""A save may be committed before the signal arrives; then it is tried again, from the start."""
LEAST_FLOPS = 3.5e12
"""Less does not last until the third save, which is the one that the kill interrupts."""
CONFIG = """\
# Written by `eke demo`. Train it again, or change it: eke train {path}
[run]
name = "demo"
dir = {dir}

[model]
source = "builtin:tiny"

[data]
train = "builtin:pydocs"
max_length = 256
eval_examples = 64

[budget]
flops = {flops!r}

[batch]
per_step = "tokens:1024"

[optimizer]
warmup_steps = 20

[governor]
eval_every = "40 steps"

[checkpoint]
every = "25 steps"
"""


def demo(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where the demonstration's runs go.")
    ] = Path("runs"),
    flops: Annotated[str, typer.Option(help="The FLOP budget.")] = "6e12",
) -> None:
    """Train, be killed in the middle of a save, resume bit-identically, stop, report."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()
    story = Story(directory, flops, console)
    story.prepare()
    story.tell()
    console.print(f"\n  that took {time.monotonic() - started:.0f} s")


@dataclass
class Kill:
    """Where the training process was when it was killed."""

    saving_step: int
    committed: list[int]
    last_step: int


class Story:
    """The demonstration, act by act."""

    def __init__(self, directory: Path, flops: str, console: Any) -> None:
        self.flops = parse_flops(flops, "--flops")
        if self.flops < LEAST_FLOPS:
            raise InputError(
                "the demonstration's budget is too small",
                value=flops,
                rule=f"its three saves and its ending need {LEAST_FLOPS:g} FLOPs",
                fix=f"Use --flops {LEAST_FLOPS:g} or more",
            )
        self.dir, self.console = directory, console
        self.run, self.reference = directory / "demo", directory / "demo-reference"
        self.config = directory / "demo.toml"

    def prepare(self) -> None:
        """Clear away an earlier demonstration, and only that."""
        for path in (self.run, self.reference):
            if path.exists():
                if not (path / "run.toml").is_file():
                    raise InputError(
                        "the demonstration's directory holds something that is not a run",
                        value=str(path),
                        fix="Choose another one with --dir",
                    )
                shutil.rmtree(path)
        # A JSON string is a TOML string, whatever the folder is called.
        quoted = json.dumps(self.dir.as_posix(), ensure_ascii=False)
        text = CONFIG.format(path=self.config, dir=quoted, flops=self.flops)
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self.config.write_text(text)
        except OSError as error:
            raise InputError(
                f"cannot write to {self.dir}: {error.strerror}", fix="Choose another --dir"
            ) from error

    def tell(self) -> None:
        """All acts, and the comparison."""
        say = self.console.print
        say(
            f"[bold]eke demo[/]: builtin:tiny on builtin:pydocs, {self.flops:g} FLOPs; two cores "
            "are enough\n"
        )
        kill = self._train_and_kill()
        say(
            f"  1  trained to step {kill.last_step}; killed with SIGKILL while saving step "
            f"{kill.saving_step}; committed before: {kill.committed}"
        )
        resumed_from = max(kill.committed)
        last = resumed_from + COMPARED_STEPS
        self._train(
            *("--set", "run.name=demo-reference", "--set", f"budget.steps={last}"),
            *("--set", "governor.reserve=0", "--set", "governor.actions=[]"),
        )
        say(f"  2  trained a second run to step {last}, undisturbed, to compare with")
        self._train()
        proof = self._compare(kill, resumed_from, last)
        say(
            f"  3  resumed from step {resumed_from}; losses of {len(proof['steps'])} steps after "
            f"that, against the undisturbed run's"
        )
        answer = "yes" if proof["bit_identical"] else "no"
        say(f"     [bold]bit-identical: {answer}[/]")
        self._ending()
        if not proof["bit_identical"]:
            raise EkeError(
                "the resumed run's losses differ from the undisturbed run's",
                value=[proof["resumed_losses"], proof["reference_losses"]],
                fix=f"Please report it with the folder {self.run}",
            )

    # ------------------------------------------------------------------ acts

    def _command(self, *more: str) -> list[str]:
        return [sys.executable, "-m", "eke", "train", str(self.config), *more]

    def _train(self, *more: str) -> None:
        done = subprocess.run(
            self._command(*more), capture_output=True, text=True, timeout=900, check=False
        )
        if done.returncode not in (0, 3):
            raise EkeError(f"training failed: {done.stderr.strip() or done.stdout.strip()}")

    def _train_and_kill(self) -> Kill:
        """Start training; kill it while a save is being written, after a few are committed."""
        for _ in range(ATTEMPTS):
            with (self.dir / "demo.log").open("w") as log:
                child = subprocess.Popen(self._command(), stdout=log, stderr=log)
                try:
                    step = self._wait_for_a_save(child)
                finally:
                    child.send_signal(signal.SIGKILL)
                    child.wait()
            committed = _committed(self.run)
            if step not in committed:
                return Kill(step, committed, _steps(self.run)[-1]["step"])
            shutil.rmtree(self.run)
        raise EkeError(
            f"each of {ATTEMPTS} saves was committed before the kill came",
            fix="Run it again, or with --dir on slower storage",
        )

    def _wait_for_a_save(self, child: subprocess.Popen[bytes]) -> int:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            if child.poll() is not None:
                text = (self.dir / "demo.log").read_text().strip()
                raise EkeError(f"training ended before it could be killed: {text[-500:]}")
            if len(_committed(self.run)) >= KILL_AFTER_SAVES:
                for attempt in (self.run / "checkpoints").glob(".tmp-step-*"):
                    if any(f.stat().st_size > 0 for f in _files(attempt, "*.safetensors")):
                        return int(attempt.name.split("-")[2])
            time.sleep(0.0005)
        raise EkeError("no save began within ten minutes", fix="Look into demo.log")

    def _compare(self, kill: Kill, resumed_from: int, last: int) -> dict[str, Any]:
        """Losses after the resume, bit by bit, and the weights' own digests where both saved."""
        ours = {r["step"]: r["loss"] for r in _steps(self.run)}
        theirs = {r["step"]: r["loss"] for r in _steps(self.reference)}
        steps = comparable(_steps(self.run), theirs, resumed_from, last)
        proof = {
            "what": "A run killed with SIGKILL in the middle of a save and resumed, against a run "
            "that was left alone: training loss of each step after the resume.",
            "killed_at_step": kill.last_step,
            "resumed_from_step": resumed_from,
            "steps": steps,
            "reference_losses": [theirs[s] for s in steps],
            "resumed_losses": [ours[s] for s in steps],
            "bit_identical": len(steps) > 0
            and all(ours[s].hex() == theirs[s].hex() for s in steps),
        }
        (self.run / "resume_proof.json").write_text(json.dumps(proof, indent=1))
        return proof

    def _ending(self) -> None:
        """How it ended, and what each part saved."""
        from eke.budget.ledger import Ledger
        from eke.report import write_report

        report = write_report(self.run)
        status = json.loads((self.run / "status.json").read_text())
        steps = _steps(self.run)
        with Ledger(self.run / "ledger.jsonl") as ledger:
            totals, spent = ledger.totals(), ledger.spent("flops") or 0.0
        lost = totals.get("lost", {}).get("seconds") or 0.0
        stall = totals.get("checkpoint", {}).get("seconds") or 0.0
        whole = sum(row["seconds"] or 0.0 for row in totals.values())
        real = sum(r["tokens"] for r in steps)
        padding = 1 - real / sum(r["padded_tokens"] for r in steps)
        naive = _naive_padding(steps)
        limit = self.flops
        say = self.console.print
        say(
            f"  4  stopped after {status['step']} steps: {status['reason']}; held-out loss "
            f"{status['loss']:.3f}; {spent / limit:.1%} of the budget spent\n"
        )
        say(f"  budget      {limit:.3g} FLOPs, {spent:.4g} spent, never passed")
        say(f"  saves       {stall:.1f} s of {whole:.0f} s; the kill cost {lost:.1f} s of work")
        say(f"  batches     {padding:.1%} padding; {naive:.0%} in order of arrival")
        say(f"  model       {self.run / 'model'}")
        say(f"  report      {report}")


# ---------------------------------------------------------------------- reading a run


def comparable(
    steps: list[dict[str, Any]], reference: Container[int], resumed_from: int, last: int
) -> list[int]:
    """The steps after the resume that both runs took at the same learning rate.

    The undisturbed run stops before its decay; where the other has begun to decay, it has parted.
    """
    return [
        r["step"]
        for r in steps
        if resumed_from < r["step"] <= last and r["phase"] != "decay" and r["step"] in reference
    ]


def _files(directory: Path, pattern: str) -> list[Path]:
    try:
        return list(directory.glob(pattern))
    except OSError:  # the attempt was renamed while we looked
        return []


def _committed(run: Path) -> list[int]:
    """Committed steps, oldest first."""
    return sorted(
        int(p.name.split("-")[1])
        for p in (run / "checkpoints").glob("step-*")
        if (p / "MANIFEST.json").exists()
    )


def _steps(run: Path) -> list[dict[str, Any]]:
    from eke.budget.jsonl import effective, read_records

    kept, _ = effective(read_records(run / "metrics.jsonl"))
    return [r.value for r in kept if r.value["kind"] == "step"]


def _naive_padding(steps: list[dict[str, Any]]) -> float:
    """Padding if each step's samples were padded to the longest of the step.

    That is what batching in order of arrival does; from the logged lengths, exactly.
    """
    real = sum(int(r["tokens"]) for r in steps)
    padded = sum(int(r["samples"]) * int(r["length_max"]) for r in steps)
    return 1.0 - real / padded
