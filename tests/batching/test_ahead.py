from __future__ import annotations

import gc
import threading
import weakref

import pytest

from eke.batching.ahead import Ahead


def test_the_result_is_taken_once_it_is_there() -> None:
    go = threading.Event()
    names: list[str] = []

    def work() -> int:
        names.append(threading.current_thread().name)
        assert go.wait(30)
        return 7

    ahead = Ahead(work, "eke-test")
    assert not ahead.ended(0.01)
    go.set()
    assert ahead.take() == 7
    assert ahead.ended(0)
    assert names == ["eke-test"]


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_what_the_work_raises_is_raised_where_it_is_taken(error: BaseException) -> None:
    def work() -> None:
        raise error

    ahead = Ahead(work, "eke-test")
    assert ahead.ended(30), "an error that nobody takes ends the thread quietly"
    with pytest.raises(type(error)):
        ahead.take()


def test_nothing_of_the_work_is_kept_alive() -> None:
    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)
    ahead = Ahead(lambda held=held: id(held), "eke-test")
    ahead.take()
    del held
    gc.collect()
    assert alive() is None
