"""Values between ranks without a collective, on real processes."""

from __future__ import annotations

from typing import Any

SCRIPT = """
    import threading, time
    from eke import distributed
    world = distributed.init(timeout_s=30.0)
    store = distributed.store()
    assert store.get("absent") is None
    # While every rank's main thread is in a collective, other threads talk.
    found = []

    def talk():
        store.put(f"word/{world.rank}", {"from": world.rank, "text": "x" * 100_000})
        while len(found) < world.size:
            value = store.get(f"word/{len(found)}")
            if value is None:
                time.sleep(0.001)
            else:
                found.append(value["from"])

    thread = threading.Thread(target=talk)
    thread.start()
    for _ in range(50):
        distributed.gather_objects(world.rank)
    thread.join()
    distributed.barrier()
    if world.is_main:
        store.drop("word/1")
        store.drop("word/1")
    distributed.barrier()
    print(found, store.get("word/1"))
    distributed.shutdown()
    print(distributed.store())
"""

GONE = """
    import os, sys, time
    from eke import distributed
    from eke.errors import EkeError
    world = distributed.init(timeout_s=5.0)
    store = distributed.store()
    distributed.barrier()
    if world.is_main:
        os._exit(0)
    try:
        while True:
            store.get("word")
            time.sleep(0.01)
    except EkeError as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)
"""


def test_threads_talk_while_the_ranks_are_in_collectives(run_ranks: Any) -> None:
    for rank in run_ranks(SCRIPT):
        assert rank.code == 0, rank.err
        assert rank.out.splitlines() == ["[0, 1] None", "None"]


def test_rank_0_is_gone(run_ranks: Any) -> None:
    assert "rank 0 does not answer" in run_ranks(GONE)[1].out


def test_alone_there_is_no_store() -> None:
    from eke import distributed

    assert distributed.store() is None
