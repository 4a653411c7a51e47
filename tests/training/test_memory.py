"""Out of memory: all ranks lower the cap together and lose nothing, or end where it cannot help."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.budget import Ledger
from eke.budget.jsonl import read_records
from eke.errors import EkeError
from eke.training import RunConfig, Trainer
from eke.training.memory import Shortage, is_out_of_memory, lowered_cap, shortages_of

WIDE_WINDOW = "[batch]\nwindow = 4096"
SCRIPT = Path(__file__).with_name("short_of_memory.py")

# ---------------------------------------------------------------------- what it is, what follows


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


@given(
    st.integers(4, 10**6),
    st.dictionaries(
        st.integers(0, 7), st.tuples(st.integers(4, 10**6), st.integers(2, 99)), min_size=1
    ),
)
def test_the_cap_falls_below_what_failed_and_below_itself(
    cap: int, failed: dict[int, tuple[int, int]]
) -> None:
    shortages = {rank: Shortage(*one, "x") for rank, one in failed.items()}
    lower = lowered_cap(cap, shortages)
    assert 2 <= lower < cap
    assert all(lower < shortage.tokens for shortage in shortages.values())


def test_a_single_sample_that_does_not_fit_is_an_error() -> None:
    told = shortages_of([None, [40, 3, "no"], [90, 1, "can't allocate"], None])
    assert list(told) == [1, 2]
    with pytest.raises(EkeError, match="a single sample of 90 tokens: can't allocate") as caught:
        lowered_cap(100, told)
    assert "data.max_length" in str(caught.value)


# ---------------------------------------------------------------------- whole runs


def run_ranks(
    start_ranks: Any, toml: Path, tokens: int, held_out: int = 10**9
) -> tuple[list[int], str]:
    """Exit codes and output. A job that hangs is killed and fails the test."""
    ranks = start_ranks(2, SCRIPT, toml, tokens, held_out)
    try:
        output = "".join(text for rank in ranks for text in rank.communicate(timeout=100))
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], output


def test_ranks_lower_the_cap_together_and_lose_no_sample(
    tmp_path: Path, corpus: Path, write_toml: Any, start_ranks: Any, standing: Any
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(corpus.read_text().splitlines(keepends=True)[:200]))
    toml = write_toml(
        tmp_path, budget="epochs = 1", eval_every="99 steps", save_every="99 steps", data=few
    )
    codes, output = run_ranks(start_ranks, toml, 90, 100)
    assert codes == [0, 0], output
    run = tmp_path / "runs" / "run"
    told, steps = standing(run, "out_of_memory"), standing(run, "step")
    evaluations = [record for record in told if record["during"] == "evaluation"]
    # The first evaluation meets it, begins again, and those after it know.
    assert 1 <= len(evaluations) < 3
    assert told[: len(evaluations)] == evaluations
    assert all(r["rank"] == 1 and r["step"] == 0 for r in evaluations)
    assert evaluations[-1]["after"] <= 100 < evaluations[-1]["tokens"]
    first, last = standing(run, "eval")
    assert last["finished"]
    assert last["loss"] < first["loss"]
    shortages = told[len(evaluations) :]
    assert 1 <= len(shortages) < 5
    assert {record["during"] for record in shortages} == {"step"}
    for record in shortages:
        assert record["rank"] == 1
        assert record["after"] < record["tokens"] <= record["before"]
        assert "can't allocate" in record["error"]
    plan = json.loads((run / "plan.json").read_text())
    assert sum(step["samples"] for step in steps) == plan["corpus"]["train"]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert not any(step["skipped"] for step in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    notes = [r.value for r in read_records(run / "ledger.jsonl")]
    assert [n["tokens"] for n in notes if n.get("kind") == "out_of_memory"] == [
        record["tokens"] for record in told
    ]
    with Ledger(run / "ledger.jsonl") as ledger:
        lost = [bill for bill in ledger.bills if bill.what == "lost"]
        assert len(lost) == len(told)
        assert all(bill.flops and bill.seconds for bill in lost)


def test_ranks_end_together_where_a_single_sample_does_not_fit(
    tmp_path: Path, write_toml: Any, start_ranks: Any
) -> None:
    codes, output = run_ranks(start_ranks, write_toml(tmp_path), 20)
    assert codes == [1, 1], output
    assert output.count("rank 1 of 2 ran out of memory on a single sample of") == 2
    status = json.loads((tmp_path / "runs" / "run" / "status.json").read_text())
    assert status["state"] == "failed"


def main(toml: str, spare_bytes: int) -> None:
    """Train under a real limit on the address space, set once everything is imported."""
    from transformers.models.llama import modeling_llama  # noqa: F401 - mapped before the limit

    torch.set_num_threads(1)
    torch.ones(64, 64).mm(torch.ones(64, 64))
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + spare_bytes,) * 2)
    sys.exit(Trainer(RunConfig.load(toml)).train().exit_code)


@pytest.mark.slow
def test_a_run_under_a_real_limit_finds_a_cap_that_fits(
    tmp_path: Path, corpus: Path, write_toml: Any, start_python: Any, standing: Any
) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text(corpus.read_text() * 6)
    toml = write_toml(
        tmp_path, budget="steps = 2", eval_every="99 steps", save_every="99 steps", data=many
    )
    text = toml.read_text().replace("micro_tokens = 128", "micro_tokens = 50000")
    toml.write_text(text.replace("tokens:256", "tokens:50000").replace("[batch]", WIDE_WINDOW))
    program = start_python(__file__, toml, 200 * 2**20)
    output = "".join(program.communicate(timeout=100))
    assert program.returncode == 0, output
    shortages = standing(tmp_path / "runs" / "run", "out_of_memory")
    assert shortages
    assert shortages[0]["before"] == 50000
    assert "allocate memory" in shortages[0]["error"] or "MemoryError" in shortages[0]["error"]
    assert len(standing(tmp_path / "runs" / "run", "step")) == 2


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
