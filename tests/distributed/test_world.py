"""Ranks: alone, and as two or three real processes under gloo, one of which may die."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.distributed import (
    World,
    barrier,
    gather_objects,
    gloo_available,
    init,
    shutdown,
    world,
    wrap,
)
from eke.errors import InputError

TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------------- one process


@given(JSON)
def test_alone_a_value_is_gathered_as_it_would_arrive(value: Any) -> None:
    assert gather_objects(value) == [json.loads(json.dumps(value))]


def test_alone_nothing_is_joined_and_nothing_waits() -> None:
    assert init() == world() == World(0, 1, 0)
    assert world().is_main
    barrier()
    model = torch.nn.Linear(2, 2)
    assert wrap(model, torch.device("cpu")) is model
    shutdown()
    shutdown()
    assert not torch.distributed.is_initialized()
    assert gloo_available()


def test_a_world_of_one_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert init() == World()


def test_what_is_not_json_is_refused_before_it_is_sent() -> None:
    with pytest.raises(TypeError):
        gather_objects({1, 2})


@pytest.mark.parametrize("absent", TORCHRUN[1:])
def test_an_incomplete_environment_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    for name in TORCHRUN:
        monkeypatch.setenv(name, "2")
    monkeypatch.delenv(absent)
    with pytest.raises(InputError) as caught:
        init()
    assert f"WORLD_SIZE is 2 but {absent} is not set" in str(caught.value)
    assert "torchrun" in str(caught.value)
    assert world() == World()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("WORLD_SIZE", "two", "WORLD_SIZE in the environment is not a whole number"),
        ("RANK", "", "RANK in the environment is not a whole number"),
        ("LOCAL_RANK", "0.5", "LOCAL_RANK in the environment is not a whole number"),
        ("RANK", "2", "RANK does not fit WORLD_SIZE"),
        ("RANK", "-1", "RANK does not fit WORLD_SIZE"),
    ],
)
def test_an_environment_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    for each in TORCHRUN:
        monkeypatch.setenv(each, "2" if each == "WORLD_SIZE" else "0")
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words) as caught:
        init()
    assert value in str(caught.value)


# ---------------------------------------------------------------------- several processes

GATHER = """
    import json, time
    from eke.distributed import barrier, gather_objects, init, shutdown, world
    assert init() is init()
    rank = world().rank
    seen = []
    # Lengths that differ by rank, so that padding is there to be taken off again.
    for value in (rank, "ü" * (1000 * rank), {"rank": rank, "none": None}, [], rank / 3):
        seen.append(gather_objects(value))
    time.sleep(0.3 * rank)
    came = time.monotonic()
    barrier()
    times = (came, time.monotonic())
    shutdown()
    shutdown()
    print(json.dumps({"seen": seen, "alone": world().size == 1, "rank": rank, "times": times}))
"""


def test_every_rank_sees_every_value_and_nobody_leaves_a_barrier_before_all_came(
    run_ranks: Callable[..., Any],
) -> None:
    ended = run_ranks(GATHER, size=3)
    assert [e.code for e in ended] == [0, 0, 0], ended
    assert not [e.err for e in ended if "deprecated" in e.err]
    results = [json.loads(e.out) for e in ended]
    times = [result.pop("times") for result in results]
    assert min(left for _, left in times) >= max(came for came, _ in times)
    for rank, result in enumerate(results):
        assert result == {
            "rank": rank,
            "alone": True,
            "seen": [
                [0, 1, 2],
                ["", "ü" * 1000, "ü" * 2000],
                [{"rank": r, "none": None} for r in range(3)],
                [[], [], []],
                [0.0, 1 / 3, 2 / 3],
            ],
        }


DYING = """
    import os, signal
    from eke.distributed import barrier, gather_objects, init, shutdown, world
    from eke.errors import EkeError
    init()
    barrier()
    if world().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        gather_objects("are you there?")
    except EkeError as error:
        print(type(error).__name__, error)
    finally:
        shutdown()
"""


def test_a_rank_that_dies_ends_the_others_with_an_error(run_ranks: Callable[..., Any]) -> None:
    # The time limit of a collective is ten minutes: it must not be what ends this.
    ended = run_ranks(DYING, limit_s=60)
    assert [e.code for e in ended] == [0, -9], ended
    assert ended[0].out.startswith("EkeError rank 0 of 2 lost the other ranks")
    assert "start the job again to resume" in ended[0].out


LATE = """
    import os, time
    from pathlib import Path
    from eke.distributed import barrier, gather_objects, init, shutdown, world
    from eke.errors import EkeError

    def wait_for(name):
        deadline = time.monotonic() + 60
        while not (FOLDER / name).exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    FOLDER = Path(os.environ["FOLDER"])
    rank = os.environ["RANK"]
    (FOLDER / rank).touch()  # importing torch takes longer on one rank than on another
    wait_for("0")
    wait_for("1")
    init(timeout_s=4.0)
    barrier()
    if rank == "1":
        wait_for("rank 0 gave up")
    else:
        try:
            gather_objects(0)
        except EkeError as error:
            print(error)
        (FOLDER / "rank 0 gave up").touch()
    shutdown()
"""


def test_a_rank_that_is_late_ends_the_others_with_an_error(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    ended = run_ranks(LATE, FOLDER=str(tmp_path))
    assert [e.code for e in ended] == [0, 0], ended
    assert ended[0].out.startswith("rank 0 of 2 lost the other ranks")


ABSENT = """
    from eke.distributed import init, world
    from eke.errors import EkeError
    try:
        init(timeout_s=2.0)
    except EkeError as error:
        print(error)
    print(world())
"""


def test_ranks_that_never_come(run_ranks: Callable[..., Any]) -> None:
    (ended,) = run_ranks(ABSENT, size=1, WORLD_SIZE="2")
    assert ended.code == 0, ended
    assert "rank 0 of 2 could not join the others" in ended.out
    assert "MASTER_ADDR" in ended.out
    assert ended.out.endswith("World(rank=0, size=1, local_rank=0)\n")


DDP = """
    import json, torch
    from eke.distributed import init, shutdown, world, wrap
    init()
    rank = world().rank
    torch.manual_seed(rank)  # wrap gives every rank the weights of rank 0
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[1].running_mean.fill_(rank)
    wrapped = wrap(model, torch.device("cpu"))
    first = model[0].weight.tolist()
    torch.manual_seed(100 + rank)
    x = torch.randn(5, 3)
    wrapped(x).square().sum().backward()
    averaged = model[0].weight.grad.tolist()
    # The same batch without its wrapper: this rank's own gradient.
    model.zero_grad()
    model(x).square().sum().backward()
    print(json.dumps({
        "wrapped": type(wrapped).__name__,
        "first": first,
        "averaged": averaged,
        "own": model[0].weight.grad.tolist(),
        "buffer": model[1].running_mean.tolist(),
    }))
    shutdown()
"""


def test_wrapped_models_average_their_gradients(run_ranks: Callable[..., Any]) -> None:
    ended = run_ranks(DDP)
    assert [e.code for e in ended] == [0, 0], ended
    zero, one = (json.loads(e.out) for e in ended)
    assert zero["wrapped"] == "DistributedDataParallel"
    assert zero["first"] == one["first"]
    assert zero["averaged"] == one["averaged"]
    own = torch.tensor([zero["own"], one["own"]])
    assert not torch.allclose(own[0], own[1])
    torch.testing.assert_close(torch.tensor(zero["averaged"]), own.mean(0))
    assert zero["buffer"] != one["buffer"]


BORROWED = """
    import torch.distributed as dist
    from eke.distributed import barrier, gather_objects, init, shutdown, world
    dist.init_process_group("gloo")
    init()
    assert gather_objects(world().rank) == [0, 1]
    shutdown()
    assert dist.is_initialized()
    dist.barrier()
    init()
    barrier()
    shutdown()
    dist.destroy_process_group()
    print("left as it was")
"""


def test_a_group_that_was_there_before_is_left_as_it_was(run_ranks: Callable[..., Any]) -> None:
    ended = run_ranks(BORROWED)
    assert [(e.code, e.out) for e in ended] == [(0, "left as it was\n")] * 2, ended
