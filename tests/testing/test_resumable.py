"""Loaders that are broken in one way each are found, and the sound ones are not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from eke.batching import CostModel, DynamicLoader
from eke.errors import InputError
from eke.testing import assert_resumable


class Samples:
    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(1 + index * 29 % 31)
        return {"input_ids": ids, "labels": ids.clone()}


def dynamic(**more: Any) -> DynamicLoader:
    settings: dict[str, Any] = {"micro_tokens": 40, "per_step": "tokens:120", "window": 24}
    return DynamicLoader(Samples(), **{**settings, **more})


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"packing": True},
        {"per_step": "samples:7", "cost": CostModel(per_token_squared=0.01)},
        {"epochs": 1, "per_step": "tokens:400"},
        {"num_workers": 1},
    ],
    ids=["tokens", "packed", "samples", "one-epoch", "workers"],
)
def test_the_loader_passes(more: dict[str, Any]) -> None:
    assert_resumable(lambda: dynamic(**more), steps=14 if not more else 5)


class Batch(Mapping[str, torch.Tensor]):
    """A batch of a plain loader: a mapping that knows its uids."""

    def __init__(self, uids: list[tuple[int, int]]) -> None:
        self.uids = uids
        self._tensors = {"input_ids": torch.tensor([i for _, i in uids])}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return 1


class Plain:
    """A sound loader of 40 samples in groups of 3 or 4 out of a buffer of 8, drawn from a seed."""

    def __init__(self) -> None:
        self.taken = self.given = 0
        self.pending: list[int] = []
        self.order = self.shuffled()

    def shuffled(self) -> list[int]:
        return random.Random(3).sample(range(40), 40)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "given": self.given, "pending": list(self.pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken, self.given = state["taken"], state["given"]
        self.pending = list(state["pending"])

    def size(self) -> int:
        return 3 + self.given % 2

    def __iter__(self) -> Iterator[Batch]:
        while self.taken < len(self.order) or self.pending:
            more = 8 - len(self.pending)
            self.pending += self.order[self.taken : self.taken + more]
            self.taken = min(self.taken + more, len(self.order))
            batch, self.pending = self.pending[: self.size()], self.pending[self.size() :]
            self.given += 1
            yield Batch([(0, i) for i in batch])


class Forgetful(Plain):
    """Forgets what is pending in its buffer, but says that it has it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.said, self.pending = self.pending, []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pending": self.pending or getattr(self, "said", [])}


class Reshuffling(Plain):
    """Shuffles anew what is pending when it resumes."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.pending_as_said = list(self.pending)
        self.pending.reverse()

    def state_dict(self) -> dict[str, Any]:
        held = self.__dict__.pop("pending_as_said", None)
        state = super().state_dict()
        if held is not None:
            self.pending_as_said = held
            state["pending"] = held
        return state

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            self.__dict__.pop("pending_as_said", None)
            yield batch


class Counting(Plain):
    """Keeps the number of batches, as if all were of one size."""

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]
        self.taken = self.given * 3


class Skipping(Counting):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]
        self.taken = self.given * 4


class Unseeded(Plain):
    def shuffled(self) -> list[int]:
        return random.SystemRandom().sample(range(40), 40)


class Doubling(Plain):
    def shuffled(self) -> list[int]:
        return [*super().shuffled()[:6], *super().shuffled()]


class Touched(Plain):
    """Moves when it is asked where it stands."""

    def state_dict(self) -> dict[str, Any]:
        self.given += 1
        return super().state_dict()


class Tensors(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generator": torch.get_rng_state()}


class Tuples(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pending": tuple(self.pending)}


class Dull(Plain):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Drifting(Plain):
    """The right samples with other tensors after a resume."""

    noise = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.noise = 1

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            batch._tensors["input_ids"] += self.noise
            yield batch


def test_a_plain_sound_loader_passes() -> None:
    assert_resumable(Plain)
    assert_resumable(Plain, steps=99)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (Forgetful, "leaves samples out"),
        (Reshuffling, "the same samples in another order|gives other samples|leaves samples out"),
        (Counting, "given before the state"),
        (Skipping, "leaves samples out"),
        (Unseeded, "two new loaders do not give the same"),
        (Doubling, "samples twice in an epoch"),
        (Touched, "another when it is asked twice"),
        (Tensors, "not of JSON values"),
        (Tuples, "does not come back from JSON"),
        (Dull, "right after load_state_dict is another"),
        (Drifting, "its step 0 holds other values"),
    ],
)
def test_broken_loaders_are_found(broken: type[Plain], says: str) -> None:
    with pytest.raises(AssertionError, match=says) as caught:
        assert_resumable(broken)
    assert "To mend it: " in str(caught.value)


def test_a_sample_that_two_ranks_are_given_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another rank were given the same: every rank its share, and no sample two of them."""
    monkeypatch.setattr("eke.testing.resumable.gather_objects", lambda value: [value, value])
    with pytest.raises(AssertionError, match="samples twice in an epoch"):
        assert_resumable(Plain)


def test_a_broken_part_of_the_loaders_own_state_is_found() -> None:
    class NoWaiting(DynamicLoader):
        """Loses the samples that wait for a fuller micro-batch."""

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.told = dict(state)
            super().load_state_dict({**state, "delivered": []})

        def state_dict(self) -> dict[str, Any]:
            return self.__dict__.pop("told", None) or super().state_dict()

    with pytest.raises(AssertionError, match="cannot be resumed"):
        assert_resumable(
            lambda: NoWaiting(Samples(), micro_tokens=40, per_step="tokens:120", window=24)
        )


def test_a_loader_that_ends_at_once_proves_nothing() -> None:
    with pytest.raises(InputError, match="ends before anything can be resumed"):
        assert_resumable(lambda: dynamic(epochs=1, per_step="tokens:99999", window=70))
