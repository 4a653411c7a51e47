"""Recorded curves, decoded, and what stopping them at a point would have cost."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eke.governor import Evaluation

DATA = Path(__file__).parent / "data"
RESERVE = 0.10


@dataclass(frozen=True)
class Curve:
    """One recorded run. Costs are steps; shares are of the run's whole length."""

    record: dict[str, Any]
    evaluations: tuple[Evaluation, ...]

    @property
    def name(self) -> str:
        return self.record["name"]

    @property
    def horizon(self) -> float:
        return float(self.record["S"])

    @property
    def from_scratch(self) -> bool:
        return self.record["start"] is None

    @property
    def bigram_loss(self) -> float:
        return self.record["bigram"]

    @property
    def scheduled_changes(self) -> tuple[float, ...]:
        return tuple(e["at"] * self.horizon for e in self.record["events"] if e["known"])

    @property
    def restarts(self) -> tuple[float, ...]:
        return tuple(e["at"] * self.horizon for e in self.record["events"] if not e["known"])

    def best_test(self, until: float) -> float:
        """True loss of the checkpoint whose held-out loss is best, up to a share of the run."""
        reached = [i for i, e in enumerate(self.evaluations) if e.cost <= until * self.horizon]
        return self.record["test"][min(reached, key=lambda i: self.evaluations[i].loss)]

    def finished_test(self, at: float) -> float:
        """True loss of the model that decays from share `at` on, or of the best checkpoint."""
        forks = [(f["step"] / self.horizon, f["test"]) for f in self.record["forks"]]
        if forks[-1][0] < 1 - RESERVE:
            forks.append((1 - RESERVE, self.record["test"][-1]))
        decayed = float(np.interp(at, *zip(*forks, strict=True)))
        return min(decayed, self.best_test(at))

    @property
    def full_test(self) -> float:
        """True loss after the whole budget, the best checkpoint kept."""
        return min(self.record["test"][-1], self.best_test(1.0))

    def hindsight(self, tolerance: float) -> float:
        """The largest share that stopping may save at `tolerance` of extra loss."""
        first = self.record["forks"][0]["step"] / self.horizon
        for at in np.linspace(first, 1 - RESERVE, 401):
            if self.finished_test(float(at)) <= self.full_test * (1 + tolerance):
                return max(0.0, 1 - float(at) - RESERVE)
        return 0.0


def _losses(record: dict[str, Any]) -> np.ndarray:
    raw = np.frombuffer(base64.b64decode(record["per"]), dtype="<u2")
    return raw.reshape(len(record["step"]), record["n_val"]) * 1e-4


@pytest.fixture(scope="session")
def curves() -> tuple[Curve, ...]:
    records = json.loads((DATA / "curves.json").read_text())["curves"]
    return tuple(
        Curve(
            record,
            tuple(
                Evaluation(step, float(step), tuple(losses))
                for step, losses in zip(record["step"], _losses(record).tolist(), strict=True)
            ),
        )
        for record in records
    )


@pytest.fixture(scope="session")
def plateau() -> tuple[Evaluation, ...]:
    """A run that lingers at n-gram level from a fifth to three fifths of its 1000 steps.

    The record holds means and standard errors; 256 examples are spread about each mean so that
    they have just that mean and that standard error.
    """
    rows = json.loads((DATA / "plateau.json").read_text())["rows"]
    spread = np.random.default_rng(0).standard_normal(256)
    spread = (spread - spread.mean()) / spread.std(ddof=1)
    return tuple(
        Evaluation(step, float(step), tuple((loss + se * 16 * spread).tolist()))
        for step, loss, se in rows
    )


@pytest.fixture(scope="session")
def history_of() -> Callable[[Sequence[float]], list[Evaluation]]:
    """Evaluations at equal costs up to 100 whose mean losses are given, with paired noise."""

    def make(
        means: Sequence[float], *, examples: int = 64, noise: float = 0.01, seed: int = 0
    ) -> list[Evaluation]:
        rng = np.random.default_rng(seed)
        hardness = rng.uniform(-0.5, 0.5, examples)
        hardness -= hardness.mean()
        history = []
        for i, mean in enumerate(means):
            wobble = rng.normal(0, noise, examples)
            losses = mean + hardness + wobble - wobble.mean()
            cost = 100 * (i + 1) / len(means)
            history.append(Evaluation(10 * (i + 1), cost, tuple(losses.tolist())))
        return history

    return make
