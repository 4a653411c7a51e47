import threading
from concurrent.futures import ThreadPoolExecutor

from eke.checkpoint import turn as module
from eke.checkpoint.turn import Turn


def test_whoever_waits_is_woken():
    turn, order = Turn(), []

    def wait():
        with turn.lock:
            ready.set()
            assert turn.wait(30)
            order.append("woken")

    ready = threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    assert ready.wait(30)
    with turn.lock:
        order.append("notified")
        turn.notify_all()
    thread.join(30)
    assert order == ["notified", "woken"]
    with turn.lock:
        assert not turn.wait(0.001)


def test_an_interrupt_anywhere_in_a_wait_leaves_the_lock_free(interrupt):
    struck = 0
    while True:
        turn = Turn()
        with interrupt(struck, module, threading) as at, turn.lock:
            turn.wait(0.001)
        with ThreadPoolExecutor(1) as another:
            assert another.submit(turn.lock.acquire, timeout=10).result()
        if at.lines <= struck:
            break
        struck += 1
    assert struck > 10
