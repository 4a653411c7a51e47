"""Where every block of one save is: the state machine that capture and writing both obey.

Pure: no threads, no clocks, no memory. Blocks lie in lanes, one for each file. Whoever can copy
asks what to copy next and says when a copy is done, in any order; whoever can write asks what to
write next and says when it is written.

    pending --start_copy--> copying --copied--> captured --start_write--> writing --written--> done

A device is asked for a copy (`issue`) some time before that is complete (`copied`).

Properties, for every order of events:

* A lane's blocks are copied in order, and handed out for writing in order, each once, and only
  after its own copy is done. So the file can be hashed as it is written.
* What is wanted is copied before what is not.
* A slot is held by every block from `start_copy` to `written`, and by no other. While anything is
  left to do and no slot is missing, there is something to copy or to write: nothing deadlocks,
  however small the pool is.
* `captured(lane, n)` is true only if the first n blocks of the lane are copied; `issued(lane, n)`
  if each is copied or a device has been asked to.

A lane that may be unchanged since the newest checkpoint is looked through first (`Check`). If it
is the same, all of it counts as captured, and it is linked and not written. While an earlier save
is in flight there is nothing to compare with yet: a *patient* lane then waits until there is,
unless training waits for it.

A save may begin before all of its lanes are known (`More`); until they are, it is neither captured
nor written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Spot(NamedTuple):
    """A block: its lane, and its number there."""

    lane: int
    block: int


class Check(NamedTuple):
    """Find out whether a lane is the same as in the newest checkpoint, then say `checked`."""

    lane: int


class Link(NamedTuple):
    """Link a lane's file, then say `linked`."""

    lane: int


class More(NamedTuple):
    """Find out what lanes there are after the first so many, then say `grow`."""

    after: int


class _Lane:
    def __init__(self, blocks: int, *, check: bool, patient: bool) -> None:
        self.blocks, self.check, self.checking = blocks, check, False
        self.given_up = False  # it is looked through, but nobody waits for what that finds
        self.patient = patient
        self.same = self.link_given = self.link_done = False
        self.started = self.given = self.written = 0
        self.issued: set[int] = set()
        self.asked = 0  # the first so many are issued
        self.done: set[int] = set()
        self.captured = 0  # the first so many are copied
        self.wanted = 0  # the first so many are waited for


class Flow:
    """One save's blocks.

    Args:
        lanes: how many blocks each lane has.
        check: the lanes to be looked through first.
        patient: those of them that nothing waits for.
        more: whether there are more lanes, which are not known yet.
    """

    def __init__(
        self,
        lanes: Sequence[int],
        check: Iterable[int] = (),
        patient: Iterable[int] = (),
        *,
        more: bool = False,
    ) -> None:
        self._lanes: list[_Lane] = []
        self._growing = False
        self.grown = False
        """Whether all lanes are known."""
        self._add(lanes, check, patient)
        self.grown = not more

    def _add(self, lanes: Sequence[int], check: Iterable[int], patient: Iterable[int]) -> None:
        first, checked, calm = len(self._lanes), set(check), set(patient)
        self._lanes += [
            _Lane(blocks, check=i in checked, patient=i in calm)
            for i, blocks in enumerate(lanes, first)
        ]

    def start_more(self) -> None:
        """The other lanes are being found out."""
        if self.grown or self._growing:
            raise ValueError("there is nothing to find out")
        self._growing = True

    def grow(
        self, lanes: Sequence[int], check: Iterable[int] = (), patient: Iterable[int] = ()
    ) -> None:
        """They are known: how many blocks each has; `check` and `patient` count all lanes."""
        if not self._growing:
            raise ValueError("nothing is being found out")
        self._add(lanes, check, patient)
        self._growing, self.grown = False, True

    # ------------------------------------------------------------------ capture

    def want(self, lane: int, blocks: int) -> None:
        """Training waits for the first `blocks` of a lane."""
        self._lanes[lane].wanted = max(self._lanes[lane].wanted, blocks)

    def next_copy(self, *, first: bool = True) -> Spot | Check | More | None:
        """What to copy, look through or find out next; None if there is nothing now.

        Args:
            first: whether no earlier save is in flight.
        """
        best: Spot | Check | More | None = None
        if not self.grown and not self._growing:
            best = More(len(self._lanes))
        for index, lane in enumerate(self._lanes):
            if lane.checking or lane.same or lane.started == lane.blocks:
                continue
            here = Check(index) if lane.check else Spot(index, lane.started)
            if lane.check and lane.patient and not first and not lane.wanted:
                continue
            if lane.started < lane.wanted:
                return here
            best = here if best is None else best
        return best

    def start_check(self, lane: int) -> None:
        """`Check(lane)` is being done."""
        one = self._lanes[lane]
        one.check, one.checking = False, True

    def checked(self, lane: int, *, same: bool) -> None:
        """It is done."""
        one = self._lanes[lane]
        if one.given_up:
            one.given_up = one.checking = False
            return
        if not one.checking:
            raise ValueError(f"lane {lane} is not being checked")
        one.checking, one.same = False, same

    def give_up_check(self, lane: int) -> None:
        """Copy a lane without looking through it; if somebody does already, never mind. It is not
        complete before that is over."""
        one = self._lanes[lane]
        one.given_up = one.given_up or one.checking
        one.check = one.checking = False

    def idle(self, lane: int) -> bool:
        """Whether nobody waits for what a look through a lane finds."""
        return not self._lanes[lane].checking

    def start_copy(self, spot: Spot) -> None:
        """A block's copy has begun."""
        lane = self._lanes[spot.lane]
        if lane.same or lane.check or lane.checking or spot.block != lane.started:
            raise ValueError(f"{spot} is not due")
        lane.started += 1

    def issue(self, spot: Spot) -> None:
        """A device has been asked for all of a block's copy: what it is asked to change after that
        copy may change."""
        lane = self._lanes[spot.lane]
        if not lane.asked <= spot.block < lane.started or spot.block in lane.issued:
            raise ValueError(f"{spot} is not being copied, or is issued")
        lane.issued.add(spot.block)
        while lane.asked in lane.issued:
            lane.issued.remove(lane.asked)
            lane.asked += 1

    def issued(self, lane: int, blocks: int) -> bool:
        """Whether the first `blocks` of a lane are issued or captured."""
        one = self._lanes[lane]
        return one.same or one.asked >= blocks

    def copied(self, spot: Spot) -> None:
        """A block's copy is complete: the live tensors may change."""
        lane = self._lanes[spot.lane]
        if not lane.captured <= spot.block < lane.started or spot.block in lane.done:
            raise ValueError(f"{spot} is not being copied")
        if spot.block >= lane.asked and spot.block not in lane.issued:
            self.issue(spot)
        lane.done.add(spot.block)
        while lane.captured in lane.done:
            lane.done.remove(lane.captured)
            lane.captured += 1

    def captured(self, lane: int, blocks: int) -> bool:
        """Whether the first `blocks` of a lane are captured."""
        one = self._lanes[lane]
        return one.same or one.captured >= blocks

    @property
    def all_captured(self) -> bool:
        """Whether nothing live is needed any more."""
        return self.grown and all(lane.same or lane.captured == lane.blocks for lane in self._lanes)

    @property
    def all_started(self) -> bool:
        """Whether there is nothing left to begin copying or looking through."""
        return self.grown and all(
            lane.same or (lane.started == lane.blocks and not lane.checking) for lane in self._lanes
        )

    # ------------------------------------------------------------------ writing

    def next_write(self) -> Spot | Link | None:
        """What to write or link next: of a file that is begun if possible; None if nothing is."""
        best: Spot | Link | None = None
        for index, lane in enumerate(self._lanes):
            if lane.same and not lane.link_given:
                return Link(index)
            if not lane.same and lane.given < lane.captured:
                spot = Spot(index, lane.given)
                if lane.given:
                    return spot
                best = spot if best is None else best
        return best

    def start_write(self, what: Spot | Link) -> None:
        """It is being written."""
        lane = self._lanes[what.lane]
        if isinstance(what, Link):
            lane.link_given = True
            return
        if what.block != lane.given or lane.given >= lane.captured:
            raise ValueError(f"{what} is not due")
        lane.given += 1

    def written(self, what: Spot | Link) -> None:
        """It is written; a block's slot is free."""
        lane = self._lanes[what.lane]
        if isinstance(what, Link):
            lane.link_done = True
            return
        if not what.block == lane.written < lane.given:
            raise ValueError(f"{what} is not being written")
        lane.written += 1

    def complete(self, lane: int) -> bool:
        """Whether all of a lane is written or linked."""
        one = self._lanes[lane]
        return one.link_done if one.same else one.written == one.blocks and not one.given_up

    @property
    def all_written(self) -> bool:
        """Whether every lane is complete."""
        return self.grown and all(self.complete(lane) for lane in range(len(self._lanes)))
