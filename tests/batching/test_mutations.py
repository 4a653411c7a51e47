"""The faults of the released package of this method, put back one at a time: each must turn a named
test red. They are patches of the running modules, in processes of their own."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUN = """
import sys
import pytest
from hypothesis import Phase, settings
# What fails is neither made smaller nor kept: that it fails is enough.
settings.register_profile("once", deadline=None, database=None, phases=[Phase.generate])
if __name__ == "__main__":
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=once", "--tb=short"]
    sys.exit(pytest.main([*options, sys.argv[1]]))
"""


class Fault(NamedTuple):
    """A fault, the test that finds it, and how it shows."""

    patch: str
    test: str
    shows: str


FAULTS = {
    "nothing, to see that the tests pass": Fault(
        "", "tests/batching/test_loader.py::test_no_class_of_others_is_changed", "1 passed"
    ),
    "slot leak: samples that found no place in the round are forgotten": Fault(
        """
        from eke.batching import planner, round_maker
        def forget(shares, rules, **more):
            made = planner.plan_round(shares, rules, **more)
            return planner.Round(made.blocks, [[] for _ in shares])
        round_maker.plan_round = forget
        """,
        "tests/batching/test_loader.py::test_uneven_shares_lose_nothing",
        "assert sorted(uid for blocks in ranks",
    ),
    "finished-rank rule: a rank that ran out before the others emits nothing more": Fault(
        """
        from eke.batching import planner, round_maker
        def finished(shares, rules, *, last, **more):
            most = max(map(len, shares))
            kept = [[] if last and len(share) < most else share for share in shares]
            return planner.plan_round(kept, rules, last=last, **{**more, "waited": ()})
        round_maker.plan_round = finished
        """,
        "tests/batching/test_loader.py::test_uneven_shares_lose_nothing",
        "assert sorted(uid for blocks in ranks",
    ),
    "loss weights that count input tokens, not labels": Fault(
        """
        from dataclasses import replace
        from eke.batching import fetch
        sample = fetch._ChunkDataset._sample
        def by_input(self, *which):
            made = sample(self, *which)
            return replace(made, label_tokens=max(0, len(made.ids) - 1))
        fetch._ChunkDataset._sample = by_input
        """,
        "tests/batching/test_loader.py::test_gradients_equal_those_of_one_big_batch",
        "assert (ours - reference).abs().max() < 1e-10",
    ),
    "silent no-sync: a rank among several hears itself alone": Fault(
        """
        from dataclasses import replace
        from eke.batching import round_maker
        make = round_maker.RoundMaker.make
        class Deaf:
            def __init__(self, exchange):
                self.rank, self.size, self.swap = exchange.rank, exchange.size, exchange.swap
            def gather(self, data):
                return [data] * self.size
        def deaf(self, *given):
            return make(replace(self, exchange=Deaf(self.exchange)), *given)
        round_maker.RoundMaker.make = deaf
        """,
        "tests/batching/test_loader.py::test_uneven_shares_lose_nothing",
        "1 failed",
    ),
    "silent no-sync: no ranks are looked for where none were joined": Fault(
        """
        from eke.batching import exchange
        exchange.exchange_of_job = lambda patience_s: exchange.Alone()
        """,
        "tests/batching/test_exchange.py::test_ranks_that_were_not_joined_are_refused",
        "DID NOT RAISE",
    ),
    "an iterable is told that it is read in torch's workers, and shares itself out": Fault(
        """
        from eke.batching import fetch
        fetch._begin_unseen = fetch._begin_worker
        """,
        "tests/batching/test_loader_stream.py::test_workers_change_nothing",
        "begins with another sample in each worker",
    ),
    "a method of torch's DataLoader is replaced for everybody": Fault(
        """
        from torch.utils.data import DataLoader
        from eke.batching import loader
        init = loader.DynamicLoader.__init__
        def patching(self, *given, **more):
            init(self, *given, **more)
            DataLoader.__len__ = lambda self: None
        loader.DynamicLoader.__init__ = patching
        """,
        "tests/batching/test_loader.py::test_no_class_of_others_is_changed",
        "1 failed",
    ),
}


def test_each_fault_turns_its_test_red(start_python: Any, tmp_path: Path) -> None:
    running = {}
    for number, (name, fault) in enumerate(FAULTS.items()):
        script = tmp_path / f"fault_{number}.py"
        script.write_text(textwrap.dedent(fault.patch) + RUN)
        running[name] = start_python(script, fault.test, cwd=ROOT)
    for name, process in running.items():
        out, err = process.communicate(timeout=240)
        expected = 1 if FAULTS[name].patch else 0
        assert process.returncode == expected, f"{name}: {out}{err}"
        assert FAULTS[name].shows in out, f"{name}: {out}"


@pytest.mark.parametrize("name", FAULTS)
def test_the_named_tests_exist(name: str) -> None:
    file, _, test = FAULTS[name].test.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text()
