"""Three real ranks; some leave, are late, are stopped or are killed in the middle of a call."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eke.distributed import Channel
from eke.errors import InputError

PRELUDE = """
    import gc, json, os, signal, sys, threading, time
    import torch
    from eke.distributed import Channel, barrier, gather_objects, init, shutdown, world
    from eke.errors import EkeError
    rank = init().rank
    def tell(**values):
        print(json.dumps(values), flush=True)
    def outcome(call):
        began = time.monotonic()
        try:
            return call()
        except EkeError as error:
            # Far less than the patience of the channel that it is asked of.
            return [str(error), time.monotonic() - began < 20]
"""

LIVING = """
    def counts():
        gc.collect()
        return [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]
    first = Channel("warming up", 60)   # torch starts threads of its own with a process's first
    first.leave("done")
    barrier()
    before = counts()

    one, two = Channel("one", 60), Channel("two", 60)
    data = bytes(range(256)) * 11 * rank
    tell(gathered=[len(d) for d in one.gather(data)], same=one.gather(data)[rank] == data)
    tell(nothing=[d.decode() for d in one.gather(b"")])
    swapped = one.swap([f"{rank}>{to}".encode() * (to + rank) for to in range(3)])
    tell(swapped=[d.decode() for d in swapped])
    seen = []
    def gather_often():
        seen.extend(two.gather(str(rank).encode()) for _ in range(9))
    thread = threading.Thread(target=gather_often)
    thread.start()
    beside = [gather_objects(i)[0] for i in range(9)]   # another group, at the same time
    thread.join()
    tell(threaded=[[d.decode() for d in s] for s in seen[-1:]], beside=beside)

    # Rank 2 leaves; rank 0 is in a call by then, and rank 1 comes later.
    if rank == 2:
        time.sleep(0.5)
        two.leave("it went home")
    if rank == 1:
        time.sleep(2)
    tell(left=outcome(lambda: two.gather(b"x")), again=outcome(lambda: two.gather(b"x")))
    two.leave("done")

    # A rank leaves while a thread of its own is in a call that the others do not come to.
    three = Channel("three", 60)
    if rank == 0:
        threading.Timer(0.5, lambda: three.leave("closed")).start()
        tell(own=outcome(lambda: three.gather(b"x")))
    barrier()
    tell(others=outcome(lambda: three.gather(b"x")))
    three.leave("done")

    # One does not come in time, and is told so when it comes.
    four = Channel("four", 1.5)
    if rank == 1:
        gather_objects("later")
        tell(late=outcome(lambda: four.gather(b"x")))
    else:
        tell(late=outcome(lambda: four.gather(b"x")))
        four.leave("tired")
        gather_objects("later")

    # A rank that goes on after an interrupt in the middle of a call does not take its answer.
    five = Channel("five", 60)
    if rank == 0:
        def interrupt(*_):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            five.gather(b"x")
        except KeyboardInterrupt:
            tell(broken=outcome(lambda: five.gather(b"y")))
        five.leave("done")
    barrier()
    if rank > 0:
        tell(broken=outcome(lambda: five.gather(b"x")))
    for channel in (one, four, five):
        channel.leave("done")
        channel.leave("twice")
    barrier()
    deadline = time.monotonic() + 30
    del channel, first, one, two, three, four, five, seen, thread
    while counts() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    after = counts()
    tell(more=[max(0, a - b) for a, b in zip(after, before)])
    shutdown()
"""

KILLED = """
    channel = Channel("killing", 60)
    channel.gather(b"x")
    if rank == int(os.environ["VICTIM"]):
        tell(pid=os.getpid())
        barrier()
        time.sleep(0.5)
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    barrier()
    tell(lost=outcome(lambda: channel.gather(b"x")))
    channel.leave("of the other")
    os._exit(0)
"""


def run(
    tmp_path: Path, start_ranks: Callable[..., Any], script: str, **more: str
) -> tuple[list[Any], list[dict[str, Any]]]:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(PRELUDE) + textwrap.dedent(script))
    ranks = start_ranks(3, file, **more)
    victim = more.get("VICTIM", "")
    try:
        for number, rank in enumerate(ranks):
            if str(number) != victim:
                rank.wait(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told = []
    for rank in ranks:
        merged: dict[str, Any] = {}
        for line in rank.out.splitlines():
            merged |= json.loads(line)
        told.append(merged)
    return ranks, told


def test_bytes_arrive_and_whoever_leaves_or_is_late_is_named(
    tmp_path: Path, start_ranks: Callable[..., Any]
) -> None:
    ranks, told = run(tmp_path, start_ranks, LIVING)
    assert [rank.returncode for rank in ranks] == [0, 0, 0], [rank.err for rank in ranks]
    for number, one in enumerate(told):
        assert one["gathered"] == [0, 2816, 5632]
        assert one["same"]
        assert one["nothing"] == ["", "", ""]
        assert one["swapped"] == [f"{r}>{number}" * (r + number) for r in range(3)]
        assert one["threaded"] == [["0", "1", "2"]]
        assert one["beside"] == list(range(9))
        assert one["more"] == [0, 0], "threads and descriptors are left"
    gone = ["rank 2 of 3 left: it went home.", True]
    for one in told[:2]:
        assert one["left"] == gone
        assert one["again"] == gone
    assert told[2]["left"] == ["this rank has left the channel for two.", True]
    assert told[0]["own"] == ["this rank has left the channel for three.", True]
    for one in told[1:]:
        assert one["others"] == ["rank 0 of 3 left: closed.", True]
    broken = "rank 0 of 3 broke off a call (five). Close what uses the channel and open it anew."
    assert told[0]["broken"] == [broken, True]
    for one in told[1:]:
        assert one["broken"] == [broken.partition(" Close")[0], True]
        assert re.match("rank 1 of 3 kept the others waiting for 1.5 s ", one["late"][0])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_at_once(
    tmp_path: Path, start_ranks: Callable[..., Any], victim: int
) -> None:
    _, told = run(tmp_path, start_ranks, KILLED, VICTIM=str(victim), SIGNAL="SIGKILL")
    for rank in {0, 1, 2} - {victim}:
        text, soon = told[rank]["lost"]
        pid = told[victim]["pid"]
        assert f"rank {victim} of 3 is gone (killing): its process {pid} has ended" in text
        assert soon


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named_when_the_patience_ends(
    tmp_path: Path, start_ranks: Callable[..., Any], victim: int
) -> None:
    script = KILLED.replace('"killing", 60', '"killing", 3')
    _, told = run(tmp_path, start_ranks, script, VICTIM=str(victim), SIGNAL="SIGSTOP")
    stopped = f"its process {told[victim]['pid']} is stopped"
    waited = rf"rank {victim} of 3 kept the others waiting for 3 s \(killing, {stopped}\)"
    # Whoever is slower may find rank 0 gone already, and what it had to say with it.
    also = rf"rank 0 of 3 is gone .* has ended; rank {victim} of 3 does not answer: {stopped}"
    first, later = sorted(
        (told[rank]["lost"] for rank in {0, 1, 2} - {victim}),
        key=lambda lost: not re.match(waited, lost[0]),
    )
    assert first[1]
    assert later[1]
    assert re.match(waited, first[0])
    assert re.match(f"{waited}|{also}", later[0])


LAST = """
    channel = Channel("last", 60)
    if rank == 1:
        # It looks for the others for a while, as if its processor were busy.
        class Slow:
            def __init__(self, store):
                self.store, self.put = store, store.put
            def get(self, key):
                time.sleep(0.8)
                return self.store.get(key)
        channel._store = Slow(channel._store)
    if rank == 2:
        # Sizes are known to all by then; what is missing is this rank's part.
        end, ends = channel._end, []
        def late(begin):
            ends.append(begin)
            time.sleep(0.9 * (len(ends) == 2))
            end(begin)
        channel._end = late
    tell(last=outcome(lambda: [d.decode() for d in channel.gather(str(rank).encode())]))
    channel.leave("all is done")
    barrier()
    shutdown()
"""


def test_a_rank_that_leaves_with_the_answer_takes_it_from_nobody(
    tmp_path: Path, start_ranks: Callable[..., Any]
) -> None:
    """Rank 1 began to look for the others before the last of them came; then rank 0 left."""
    _, told = run(tmp_path, start_ranks, LAST)
    assert [one["last"] for one in told] == [["0", "1", "2"]] * 3


ENDING = """
    channel = Channel("ending", 100)
    waiting = threading.Thread(target=lambda: tell(own=outcome(lambda: channel.gather(b"x"))[0]))
    if rank == 0:
        waiting.daemon = True
        waiting.start()
        time.sleep(0.3)
    barrier()
    def start(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = start
    if rank > 0:
        barrier()
    channel.leave("Python ends")
    if rank == 0:
        waiting.join()
        barrier()
    del channel
    gc.collect()
    tell(ended=True)
"""


def test_a_python_that_ends_and_starts_no_threads_leaves_its_channels(
    tmp_path: Path, start_ranks: Callable[..., Any]
) -> None:
    """As from 3.12 on, in what runs at its end; one rank is in the middle of a call."""
    ranks, told = run(tmp_path, start_ranks, ENDING)
    assert [(rank.returncode, rank.err) for rank in ranks] == [(0, "")] * 3
    assert [one["ended"] for one in told] == [True] * 3
    assert told[0]["own"] == "this rank has left the channel for ending."


def test_one_rank_has_no_channel() -> None:
    with pytest.raises(InputError, match="a channel needs several ranks; got 1"):
        Channel("batching", 1.0)
