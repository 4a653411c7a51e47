"""Every interleaving of the round protocol in a small scope, on the real loader.

Explicit-state search. A rank is the real `DynamicLoader` on an exchange that stops where an answer
is missing; what a rank is, is the list of what happened to it, and it is run again from the start
to see what it does next. Moves: a rank asks for its next block, hears the answer of a call that all
have made, wishes to stop, makes its next round at once or as late as it can; the job crashes and
starts again on any other number of ranks from the last step that all have finished.

Checked in every state: somebody can move, or all have ended alike; nobody fails; ranks that have
given as many blocks stand at the same place; and at the end each sample of the epoch was delivered
once, in a bounded number of rounds.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from eke.batching import DynamicLoader
from eke.batching import loader as loader_module

Event = tuple[Any, ...]
"""("next",), ("stop",) or ("heard", answer)."""
Uids = tuple[tuple[int, int], ...]


class Missing(BaseException):
    """A call's answer is not there yet."""


class Replayed:
    """An exchange whose answers are known up to some call."""

    def __init__(self, rank: int, size: int, hear: Callable[[], list[bytes]]) -> None:
        self.rank, self.size, self._hear = rank, size, hear
        self.posted: list[tuple[bytes, ...]] = []

    def gather(self, data: bytes) -> list[bytes]:
        self.posted.append((data,))
        return self._hear()

    def swap(self, outgoing: Sequence[bytes]) -> list[bytes]:
        self.posted.append(tuple(outgoing))
        return self._hear()

    def leave(self, why: str) -> None:
        """Nobody is told: what becomes of the others is the channel's matter."""


class Lengths:
    """Item i has so many tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [1] * self._lengths[index]
        return {"input_ids": ids, "labels": ids}


class OneByOne:
    """The same, as an iterable: ranks learn that it ends from one another."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._items = Lengths(lengths)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._items[i] for i in range(len(self._items)))


class Earliest:
    """The next round is made as soon as it can be."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self._made = work()

    def wait(self) -> None:
        pass

    def take(self) -> Any:
        self.wait()
        return self._made

    def ended(self, within_s: float) -> bool:
        return True


class Latest(Earliest):
    """The next round is made when it is asked for."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self._work: Callable[[], Any] | None = work

    def wait(self) -> None:
        if self._work is not None:
            self._made, self._work = self._work(), None


@dataclass(frozen=True)
class Rank:
    """What a rank has come to."""

    steps: tuple[Uids, ...]
    states: tuple[str, ...]
    micro_steps: tuple[int, ...]
    posted: tuple[tuple[bytes, ...], ...]
    heard: int
    ended: bool
    stopped: str
    rounds: int

    @property
    def is_calling(self) -> bool:
        return len(self.posted) > self.heard


@dataclass
class Job:
    """Ranks of one world size that start at one state, explored whole."""

    lengths: tuple[int, ...]
    settings: dict[str, Any]
    size: int
    start: str
    eager: tuple[bool, ...]
    dataset: Callable[[Sequence[int]], Any] = Lengths
    seen: dict[tuple[int, tuple[Event, ...]], Rank] = field(default_factory=dict)

    def rank_after(self, rank: int, events: tuple[Event, ...]) -> Rank:
        if (rank, events) not in self.seen:
            self.seen[rank, events] = self._replay(rank, events)
        return self.seen[rank, events]

    def _replay(self, rank: int, events: tuple[Event, ...]) -> Rank:
        answers = [list(event[1]) for event in events if event[0] == "heard"]
        heard = 0

        def hear() -> list[bytes]:
            nonlocal heard
            if heard == len(answers):
                raise Missing
            heard += 1
            return answers[heard - 1]

        loader_module.Ahead = Earliest if self.eager[rank] else Latest  # type: ignore[misc, assignment]
        exchange = Replayed(rank, self.size, hear)
        loader = DynamicLoader(
            self.dataset(self.lengths), exchange=exchange, epochs=1, shuffle=False, **self.settings
        )
        loader._thread_ahead = True
        if self.start:
            loader.load_state_dict(json.loads(self.start))
        steps, states, micro_steps = [], [json.dumps(loader.state_dict())], []
        ended = False
        try:
            for number, event in enumerate(events):
                if event[0] == "stop":
                    loader.stop("enough")
                elif event[0] == "next":
                    # A wish during the call is one of the thread's: it counts for the round after.
                    block = next(loader.blocks(), None)
                    if block is None:
                        assert not any(e[0] == "next" for e in events[number + 1 :])
                        ended = True
                        break
                    steps.append(tuple(uid for mb in block for uid in mb.uids))
                    micro_steps.append(len(block))
                    states.append(json.dumps(block.position))
        except Missing:
            pass
        return Rank(
            tuple(steps), tuple(states), tuple(micro_steps), tuple(exchange.posted), heard,
            ended, loader.stopped, loader.stats.rounds,
        )  # fmt: skip

    def explore(self, found: Callable[[str, tuple[Uids, ...], str], None]) -> int:
        """Visit every state; tell of each place that a job can start again from.

        Args:
            found: gets the state, the samples of each step before it, and why the job ended
                there: "" if it did not, "end" at the end of the epoch, or the agreed reason.

        Returns:
            How many states there are.
        """
        first = ((),) * self.size
        todo, visited = deque([first]), {first}
        while todo:
            state = todo.popleft()
            ranks = [self.rank_after(r, events) for r, events in enumerate(state)]
            self._check(ranks)
            least = min(len(rank.steps) for rank in ranks)
            done = tuple(
                tuple(sorted(uid for rank in ranks for uid in rank.steps[k])) for k in range(least)
            )
            over = all(rank.ended for rank in ranks)
            why = (ranks[0].stopped or "end") if over else ""
            found(ranks[0].states[least], done, why)
            moves = list(self._moves(state, ranks))
            assert moves or over, f"nobody can move: {ranks}"
            for after in moves:
                if after not in visited:
                    visited.add(after)
                    todo.append(after)
        return len(visited)

    def _moves(
        self, state: tuple[tuple[Event, ...], ...], ranks: Sequence[Rank]
    ) -> Iterator[tuple[tuple[Event, ...], ...]]:
        wished = any(("stop",) in events for events in state)
        for r, (events, rank) in enumerate(zip(state, ranks, strict=True)):
            more: list[Event] = []
            if rank.is_calling:
                if all(len(other.posted) > rank.heard for other in ranks):
                    call = [other.posted[rank.heard] for other in ranks]
                    is_gather = len(call[r]) == 1
                    assert len({len(one) for one in call}) == 1, "a gather meets a swap"
                    answer = tuple(one[0] if is_gather else one[r] for one in call)
                    more.append(("heard", answer))
            elif not rank.ended:
                more.append(("next",))
                if not wished and self.size > 1:
                    more.append(("stop",))
            for event in more:
                yield (*state[:r], (*events, event), *state[r + 1 :])

    def _check(self, ranks: Sequence[Rank]) -> None:
        for a, b in itertools.combinations(ranks, 2):
            both = min(len(a.steps), len(b.steps))
            assert a.states[: both + 1] == b.states[: both + 1]
            assert a.micro_steps[:both] == b.micro_steps[:both]
            if a.ended and b.ended:
                assert (a.stopped, len(a.steps)) == (b.stopped, len(b.steps))


def explore_all(
    lengths: tuple[int, ...],
    settings: dict[str, Any],
    sizes: Sequence[int],
    eager: Sequence[bool],
    dataset: Callable[[Sequence[int]], Any] = Lengths,
) -> int:
    """All jobs that can come of one data set: the first, and each that goes on after another."""
    n = len(lengths)
    whole = sorted((0, i) for i in range(n) if lengths[i])
    before: dict[str, list[tuple[int, int]]] = {"": []}
    todo = deque([""])
    states = 0
    ends = 0
    while todo:
        start = todo.popleft()
        for size in sizes:
            job = Job(lengths, settings, size, start, tuple(eager[:size]), dataset)
            base = before[start]

            def found(state: str, done: tuple[Uids, ...], why: str, base: Any = base) -> None:
                nonlocal ends
                ledger = sorted([*base, *(uid for step in done for uid in step)])
                if why == "end":
                    assert ledger == whole
                    ends += 1
                if state in before:
                    assert before[state] == ledger, "a state stands for two histories"
                else:
                    assert len(set(ledger)) == len(ledger)
                    before[state] = ledger
                    todo.append(state)

            states += job.explore(found)
            if not start:
                most = max(
                    math.ceil(len(range(r, n, size)) / settings["window"]) for r in range(size)
                )
                rounds = max(rank.rounds for rank in job.seen.values())
                assert rounds <= most + settings.get("wait_rounds", 1) + (dataset is OneByOne)
    assert ends
    return states


@pytest.fixture(autouse=True)
def _threads_as_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "Ahead", loader_module.Ahead)


def scope(samples: int, full: bool) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """Data sets of so many samples of one or two tokens, and settings."""
    manners = [
        ("tokens:2", False, 1, False), ("samples:2", False, 1, True), ("tokens:3", True, 1, True)
    ]  # fmt: skip
    if full:
        manners += [("tokens:2", False, 0, True), ("samples:1", True, 1, False)]
    for lengths in itertools.product((1, 2), repeat=samples):
        for window, manner in itertools.product((1, 2), manners):
            per_step, packing, wait_rounds, move = manner
            settings = {
                "micro_tokens": 2, "per_step": per_step, "window": window,
                "packing": packing, "wait_rounds": wait_rounds, "move_samples": move,
            }  # fmt: skip
            yield lengths, settings


def test_every_interleaving_of_three_ranks_and_three_samples() -> None:
    """One rank makes its rounds as late as it can, the others as early."""
    states = sum(
        explore_all(lengths, settings, (1, 2, 3), (True, False, True))
        for n in (1, 2, 3)
        for lengths, settings in scope(n, full=False)
    )
    print(f"{states} states")
    assert states > 100_000  # 158,917 when this was written


def test_every_interleaving_of_three_ranks_and_an_iterable() -> None:
    states = sum(
        explore_all(lengths, settings, (1, 2, 3), (True, False, True), OneByOne)
        for n in (1, 2)
        for lengths, settings in scope(n, full=False)
    )
    print(f"{states} states")
    assert states > 30_000  # 45,098 when this was written


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("samples", [1, 2, 3, 4])
@pytest.mark.parametrize("early", [(True, False, True), (True,) * 3, (False,) * 3])
def test_every_interleaving_of_three_ranks_and_four_samples(
    samples: int, early: tuple[bool, ...]
) -> None:
    states = sum(
        explore_all(lengths, settings, (1, 2, 3), early, dataset)
        for lengths, settings in scope(samples, full=True)
        for dataset in (Lengths, OneByOne)
    )
    print(f"{samples} samples, {early}: {states} states")
    assert states > 400 * 2**samples
