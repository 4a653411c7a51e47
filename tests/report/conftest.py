"""Run directories as a training run writes them, crash and resume included, and a browser."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from eke.budget.bill import Bill
from eke.budget.jsonl import JsonlFile
from eke.budget.messages import Alternative, Decision
from eke.budget.trace import TraceFile
from eke.checkpoint import Ticket
from eke.checkpoint.timeline import Span
from eke.training.timeline import Lap, Scribe, Turn

BEGAN = 1_790_000_000.0
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
BINS, CAP = 24, 512


@dataclass
class RunWriter:
    """Plays a training run against the clock of its own records and writes what it would write."""

    root: Path
    steps: int = 240
    seed: int = 0
    name: str = "pydocs-tiny"
    lr: float = 3e-3
    flops_limit: float | None = None
    joules: float | None = None
    budget: dict[str, Any] = field(default_factory=dict)
    clock: float = BEGAN
    flops: float = 0.0
    tokens: int = 0
    checkpoints: dict[int, tuple[int, int, int, float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.open()

    def open(self) -> None:
        self.metrics = JsonlFile(self.root / "metrics.jsonl")
        self.ledger = JsonlFile(self.root / "ledger.jsonl")
        self.decisions = JsonlFile(self.root / "decisions.jsonl")

    def close(self) -> None:
        for file in (self.metrics, self.ledger, self.decisions):
            file.close()

    def bill(self, what: str, step: int, seconds: float | None, **more: Any) -> None:
        """What happened just now took `seconds` and cost what `more` says."""
        self.clock += seconds or 0.0
        if self.joules is not None and seconds is not None:
            more.setdefault("joules", self.joules * seconds)
        bill = Bill("training", what, step, seconds=seconds, **more)  # type: ignore[arg-type]
        self.ledger.append({"kind": "bill", **bill.to_json(), "t": self.clock})

    def phase(self, step: int) -> str:
        if step <= self.steps * 0.06:
            return "warmup"
        return "stable" if step <= self.steps * 0.82 else "decay"

    def true_loss(self, step: int) -> float:
        decay = max(0.0, step - self.steps * 0.82) / (self.steps * 0.18)
        base = 2.1 + 7.2 * (step + 3.0) ** -0.42
        return base * (1 - 0.06 * min(decay, 1.0)) + 0.02 * self.seed

    def used(self) -> float:
        limit = self.flops_limit or self.steps * 3.2e12 * 1.35
        return min(1.0, self.flops / limit)

    @staticmethod
    def two_ranks(real: int, padding: int, share: float = 0.49) -> list[list[int]]:
        """What each of two ranks did, the first of them this share; the lighter one waits."""
        first = [int(real * share), int(padding * share)]
        second = [real - first[0], padding - first[1]]
        slowest = max(sum(first), sum(second))
        return [[*row, slowest - sum(row), 0] for row in (first, second)]

    def step(self, step: int, loss: float | None = None) -> None:
        # Losses and lengths depend on the seed and the step alone, so doing it again is the same.
        rng = random.Random(self.seed * 1_000_003 + step)
        lengths = [min(CAP, max(8, int(rng.lognormvariate(4.9, 0.6)))) for _ in range(48)]
        histogram = [0] * BINS
        for length in lengths:
            histogram[min(BINS - 1, length * BINS // CAP)] += 1
        real, padded = sum(lengths), sum(lengths) + int(rng.uniform(0.01, 0.09) * sum(lengths))
        waste = random.Random(self.seed * 7_000_003 + step)
        trained = self.two_ranks(real, padded - real)
        fixed = self.two_ranks(real, int(waste.uniform(0.3, 0.6) * real), waste.uniform(0.4, 0.6))
        busy, cost = rng.uniform(0.9, 1.1), 3.2e12 * padded / 9000
        wait = rng.expovariate(60)
        self.bill("wait", step, wait)
        share = 1 - real / padded
        self.bill("train", step, busy * (1 - share), flops=cost * (1 - share), tokens=real)
        self.bill("padding", step, busy * share, flops=cost * share)
        self.bill("govern", step, 0.004)
        self.flops += cost
        self.tokens += real
        self.metrics.append(
            {
                "kind": "step", "step": step, "epoch": 0, "phase": self.phase(step),
                "loss": self.true_loss(step) + rng.gauss(0, 0.09) if loss is None else loss,
                "lr": self.lr, "grad_norm": rng.uniform(0.5, 1.5), "samples": len(lengths),
                "tokens": real, "label_tokens": real - 48, "padded_tokens": padded,
                "micro_batches": 4, "ranks": trained,
                "fixed": {"samples": 4, "micro_batches": 6, "ranks": fixed},
                "length_min": min(lengths),
                "length_mean": real / len(lengths), "length_max": max(lengths),
                "lengths": histogram, "length_cap": CAP, "step_s": busy, "wait_s": wait,
                "stall_s": 0.0, "rss_bytes": 812_000_000, "tokens_per_s": real / (busy + wait),
                "flops_total": self.flops, "tokens_total": self.tokens,
                "budget_used": self.used(), "t": self.clock,
            }
        )  # fmt: skip

    def evaluate(self, step: int, *, finished: bool = False, examples: int = 64) -> None:
        rng = random.Random(7)  # the same examples each time
        weights = [rng.randint(20, 400) for _ in range(examples)]
        hard = [rng.gauss(0, 0.35) for _ in range(examples)]
        own = random.Random(self.seed * 31 + step)
        losses = [self.true_loss(step) + 0.05 + h + own.gauss(0, 0.04) for h in hard]
        mean = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
        se = math.sqrt(sum((w * (x - mean)) ** 2 for w, x in zip(weights, losses, strict=True)))
        self.bill("eval", step, 1.4, flops=6e11)
        record: dict[str, Any] = {
            "kind": "eval", "step": step, "flops_total": self.flops, "budget_used": self.used(),
            "loss": mean, "se": se / sum(weights), "examples": examples, "seconds": 1.4,
            "losses": losses, "finished": finished, "t": self.clock,
        }  # fmt: skip
        if step == 0:
            record["weights"] = weights
        self.metrics.append(record)

    def decide(self, step: int, action: str, reason: str, **evidence: Any) -> None:
        decision = Decision(
            action, step, reason, evidence,  # type: ignore[arg-type]
            (Alternative("stop", "a stop before the decay leaves 1 to 8 % of the loss"),)
            if action == "decay" else (),
        )  # fmt: skip
        self.decisions.append(
            {"kind": "decision", **decision.to_json(), "ledger_offset": self.ledger.offset,
             "t": self.clock}
        )  # fmt: skip

    def checkpoint(self, step: int) -> None:
        self.bill("checkpoint", step, 0.12)
        self.checkpoints[step] = (
            self.metrics.offset, self.ledger.offset, self.decisions.offset, self.flops, self.tokens
        )  # fmt: skip

    def kill_and_resume(self, step: int) -> None:
        """Die now, an hour passes, a new process goes on from the checkpoint of `step`."""
        self.close()
        with (self.root / "metrics.jsonl").open("ab") as file:
            file.write(b'{"kind":"step","step":99,"lo')  # what a kill leaves
        self.clock += 3600
        self.open()
        metrics, ledger, decisions, self.flops, self.tokens = self.checkpoints[step]
        self.metrics.mark_resume(metrics, step=step, t=self.clock)
        self.ledger.mark_resume(ledger, step=step, t=self.clock)
        self.decisions.mark_resume(decisions, step=step, t=self.clock)
        lost = Bill("training", "lost", step, flops=1e12, seconds=0.5, measured=False)
        self.ledger.append({"kind": "bill", **lost.to_json(), "t": self.clock})
        self.bill("startup", step, 3.1)

    def config(self, **sections: Any) -> None:
        limit = self.flops_limit or self.steps * 3.2e12 * 1.35
        table: dict[str, Any] = {
            "run": {"name": self.name, "dir": "runs", "seed": self.seed, "deterministic": True},
            "model": {"source": "builtin:tiny", "dtype": "float32"},
            "data": {"train": "builtin:pydocs", "eval": "builtin:pydocs", "max_length": CAP},
            "budget": {"memory": "2GiB", "flops": f"{limit:.3e}", "wall_time": "30m"},
            "batch": {"mode": "tokens", "per_step": 8192, "micro_tokens": 2048, "window": 512},
            "optimizer": {"lr": self.lr, "schedule": "wsd", "weight_decay": 0.1, "clip": 1.0},
            "governor": {"min_gain": 0.015, "patience": 2, "reserve": 0.1},
            "checkpoint": {"every": "50 steps", "keep_last": 2},
            "log": {"every": 1},
        }
        table.update(sections)
        (self.root / "run.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
        self.json(
            "plan.json", parameters=4_213_760, flops_per_token=2.6e7,
            limits={"flops": limit, "seconds": 1800.0},
            data={"fingerprint": "9f2c1ab4d07e6655", "samples": 18_211},
        )  # fmt: skip

    def json(self, file_name: str, **values: Any) -> None:
        (self.root / file_name).write_text(json.dumps(values), encoding="utf-8")

    def trace(self, stalls_ms: tuple[float, ...] = (4.1, 3.7, 61.0, 4.4, 3.9)) -> None:
        """Steps of 180 ms, and every tenth a save of three steps that stalls as given."""
        file = TraceFile(self.root / "trace.json")
        scribe = Scribe(0, time.time() - time.perf_counter())
        file.append(scribe.names())
        at = 2.0
        for step in range(1, 10 * len(stalls_ms) + 5):
            number, since = divmod(step - 10, 10)
            stall_s = stalls_ms[number] / 1e3 if 0 <= number < len(stalls_ms) else 0.0
            laps = [("data", 0.004), ("forward and backward", 0.150)]
            laps += [("optimizer", 0.022 + (stall_s / 2 if since == 1 else 0.0))]
            laps += [("save", stall_s / 2)] if since == 0 and stall_s else []
            laps += [("decide and log", 0.004)]
            cut = []
            for name, seconds in laps:
                cut.append(Lap(name, at, at + seconds))
                at += seconds
            file.append(scribe.turn(Turn(step, tuple(cut))))
            if since == 0 and stall_s:
                call = cut[3].begin_s
                ticket = Ticket(step, self.root / "checkpoints" / f"step-{step:09d}")
                ticket.marks.began_s, ticket.stall_s = call, stall_s
                spans = [
                    Span("training", "save", call, call + stall_s / 2),
                    Span("training", "barrier", call + 0.17, call + 0.17 + stall_s / 2),
                    Span("capture", "eager copy", call + 0.001, call + 0.002),
                    Span("capture", "lazy copy", call + 0.003, call + 0.168),
                    *(Span("write", "write", call + 0.01 + i / 10, call + 0.09 + i / 10)
                      for i in range(4)),
                    Span("write", "fsync", call + 0.4, call + 0.45),
                    Span("commit", "commit", call + 0.45, call + 0.48),
                ]  # fmt: skip
                for state, end_s in (("captured", 0.17), ("persisted", 0.45), ("committed", 0.48)):
                    ticket.reach(state)  # type: ignore[arg-type]
                    ticket.seconds[state] = end_s  # type: ignore[index]
                file.append(scribe.save(ticket, spans))
        file.close()

    def play(self, *, crash: bool = True, proof: bool = True) -> Path:
        """A whole run: decisions, a crash, a resume, the final decay, a finished model."""
        n, every = self.steps, max(1, self.steps // 16)
        crash_at, from_step = (int(n * 0.47), every * 7) if crash else (-1, -1)
        self.config()
        self.decisions.append({"kind": "governor", "config": {"epsilon": 0.015, "twice": 2}})
        self.bill("startup", 0, 4.2)
        self.evaluate(0)
        self.checkpoint(0)
        step = 1
        while step <= n:
            self.step(step)
            if step % every == 0:
                self.evaluate(step)
                self.decide(
                    step, "continue", "immune: less than 40 % of the budget is used"
                    if step < 0.4 * n else "what is left to gain is above 1.5 % of the loss",
                    share=self.used(), bound_nats=0.31 / step, slope=-0.12, se=0.008,
                )  # fmt: skip
                self.checkpoint(step)
            if step == crash_at:
                crash_at = -1
                self.kill_and_resume(from_step)
                step = from_step
            if step == int(n * 0.82):
                self.decide(
                    step, "decay", "what is left to gain, 0.019 nats, is below 1.5 % of the loss "
                    "twice running", share=self.used(), bound_nats=0.0192, slope=-0.031,
                    se=0.0041, epsilon=0.015, loss=2.71, window=9, reserve=0.1, twice=2, extra=1,
                )  # fmt: skip
            step += 1
        self.evaluate(n, finished=True)
        self.trace()
        self.bill("finish", n, 2.2)
        self.close()
        self.json(
            "status.json", state="finished", step=n, exit_code=0,
            reason="decayed and stopped: more compute would gain less than 1.5 % of the loss",
        )  # fmt: skip
        if proof:
            losses = [self.true_loss(s) for s in range(1, 41)]
            self.json(
                "resume_proof.json", killed_at_step=22, resumed_from_step=15,
                steps=list(range(1, 41)), reference_losses=losses, resumed_losses=losses,
                bit_identical=True,
                what="The same run twice on one machine: once left alone, once killed with "
                "SIGKILL while a checkpoint was being written, and started again.",
            )  # fmt: skip
        return self.root


MakeRun = Callable[..., RunWriter]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Make a writer for a run directory below `tmp_path`; closed at the end."""
    made: list[RunWriter] = []

    def make(directory: str = "run", **settings: Any) -> RunWriter:
        root = tmp_path / directory
        root.mkdir(parents=True)
        made.append(RunWriter(root, **settings))
        return made[-1]

    yield make
    for writer in made:
        writer.close()


@pytest.fixture
def full_run(make_run: MakeRun) -> Path:
    """A finished run with a crash, decisions and a resume proof."""
    return make_run().play()


SVG = "{http://www.w3.org/2000/svg}"


def _check_svg(markup: str) -> ET.Element:
    """Parse a picture and assert that everything drawn lies inside its view box."""
    root = ET.fromstring(markup)
    assert root.tag == f"{SVG}svg"
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    named = [root.find(f"{SVG}title"), root.find(f"{SVG}desc")]
    assert all(n is not None and n.text for n in named)
    assert root.attrib["aria-labelledby"].split() == [
        n.attrib["id"] for n in named if n is not None
    ]
    for element in root.iter():
        get = {k: float(v) for k, v in element.attrib.items() if k in _PLACES}
        xs = [get[k] for k in ("x", "x1", "x2", "cx") if k in get]
        ys = [get[k] for k in ("y", "y1", "y2", "cy") if k in get]
        if "width" in get and element is not root:
            xs.append(get["x"] + get["width"])
            ys.append(get["y"] + get["height"])
        if "d" in element.attrib:
            pairs = [p.split() for p in element.attrib["d"].lstrip("M").split("L")]
            xs += [float(x) for x, _ in pairs]
            ys += [float(y) for _, y in pairs]
        assert all(-0.01 <= x <= width + 0.01 for x in xs), (element.tag, element.attrib)
        assert all(-0.01 <= y <= height + 0.01 for y in ys), (element.tag, element.attrib)
    return root


_PLACES = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height")


@pytest.fixture(scope="session")
def check_svg() -> Callable[[str], ET.Element]:
    """Parse SVG markup; fails where a coordinate lies outside or a name is missing."""
    return _check_svg


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium; tests that use it are skipped where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium or chromedriver is not installed (Debian: chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("chromium")
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()
