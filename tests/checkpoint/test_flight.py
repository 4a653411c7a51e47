from types import SimpleNamespace

import pytest

from eke.checkpoint.flight import Flight, Flights
from eke.checkpoint.flow import Spot
from eke.errors import EkeError


class Fake:
    """A block under way: done when it is told to be."""

    def __init__(self, fails=None, changed=False):
        self.there, self.held, self.fails, self.changed = False, 0, fails, changed

    def done(self):
        return self.there

    def wait(self):
        if self.fails:
            raise self.fails

    def hold(self):
        self.held += 1
        if self.fails:
            raise self.fails

    def check(self):
        if self.changed:
            raise EkeError("it was changed")


@pytest.fixture
def flights():
    return Flights()


def add(flights, task, lane, block, **more):
    flight = Flight(task, Spot(lane, block), 0, Fake(**more))
    flights.add(flight)
    return flight


def test_the_one_that_is_there_comes_first_else_the_oldest(flights):
    assert flights.next() is None
    task = SimpleNamespace()
    one, two, three = (add(flights, task, 0, block) for block in range(3))
    assert flights.next() is one
    two.issued.there = True
    assert flights.next() is two
    assert flights.know(two.issued)
    assert flights.land(two) is None
    assert not flights.know(two.issued)
    assert flights.next() is one
    assert flights.land(one) is None
    assert flights.next() is three
    assert len(flights) == 1


def test_only_what_is_needed_is_held(flights):
    task, other = SimpleNamespace(), SimpleNamespace()
    found = {
        (name, lane, block): add(flights, whose, lane, block)
        for name, whose in (("task", task), ("other", other))
        for lane in range(2)
        for block in range(3)
    }
    assert flights.hold(task, {1: 2}) is None
    held = {key for key, flight in found.items() if flight.issued.held}
    assert held == {("task", 1, 0), ("task", 1, 1)}
    assert held == {key for key, flight in found.items() if flight.held}


def test_a_change_counts_until_training_waits_for_the_copy(flights):
    task = SimpleNamespace()
    early, late = (add(flights, task, lane, 0, changed=True) for lane in range(2))
    flights.hold(task, {1: 1})
    assert "was changed" in str(flights.land(early))
    assert flights.land(late) is None
    assert len(flights) == 0


def test_what_the_device_says_is_given_back(flights):
    error = RuntimeError("the device is gone")
    flight = add(flights, SimpleNamespace(), 0, 0, fails=error)
    assert flight.wait() is error
    assert flights.hold(flight.task, {0: 1}) is error
    assert flights.hold(flight.task, {}) is None
