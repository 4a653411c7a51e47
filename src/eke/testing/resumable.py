"""Does a loader go on where a saved one stood? Checked by resuming it after every step.

Any loader will do that has `state_dict` and `load_state_dict`: an `eke.DynamicLoader`, one around
it, or another. Every violation is one `AssertionError` that says what happens.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch

from eke.distributed import gather_objects
from eke.errors import InputError

_SHOWN = 4


class Resumable(Protocol):
    """A loader: iterated, or by its `blocks()` where it has them; closed where it can be."""

    def state_dict(self) -> Mapping[str, Any]:
        """Where it stands, as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on there."""
        ...


def assert_resumable(make_loader: Callable[[], Resumable], *, steps: int = 6) -> None:
    """Check that a loader, resumed after any step, gives what it would have given.

    It runs for some steps; then a new loader resumes at each of the states on the way, and all that
    it gives is compared, bit for bit: uids, numbers and tensors. With several ranks this is a
    collective: the states are compared between them, and no sample may be given to two of them.

    Args:
        make_loader: makes a loader that stands at its beginning, always of the same data and seed.
        steps: how many blocks (or items) to run; fewer if the loader ends before.

    Raises:
        AssertionError: the loader breaks the promise; the message says at which step, and how.
        InputError: it gives fewer than two steps, so that nothing could be resumed.
    """
    first = _Run(make_loader, None, steps)
    if len(first.items) < 2:
        raise InputError(
            "the loader ends before anything can be resumed",
            value=f"{len(first.items)} steps",
            rule="at least 2 are compared",
            fix="Give make_loader more data, or smaller steps",
        )
    _once(first)
    again = _Run(make_loader, None, steps)
    if again.items != first.items:
        _fail(
            "two new loaders do not give the same",
            _apart(again.items, first.items, []),
            "take the order from a seed, not from the clock or a generator that others draw from",
        )
    for at, state in enumerate(first.states):
        resumed = _Run(make_loader, state, len(first.items) - at)
        if resumed.items != first.items[at:]:
            _fail(
                f"resumed after {at} of {len(first.items)} steps, it does not go on where it stood",
                _apart(resumed.items, first.items[at:], first.items[:at]),
                "let state_dict hold all that the next step depends on: the place in the order, "
                "what is pending in buffers, and the state of every generator",
            )
        if resumed.states != first.states[at:]:
            _fail(
                f"resumed after {at} of {len(first.items)} steps, its states differ",
                "the same step leads to another state_dict than without the resume",
                "let load_state_dict take back all that state_dict gives",
            )


class _Run:
    """What a loader gives, as values that compare, and its states: one more than steps."""

    def __init__(self, make_loader: Callable[[], Resumable], state: str | None, steps: int) -> None:
        loader = make_loader()
        try:
            if state is not None:
                loader.load_state_dict(json.loads(state))
            self.items: list[Any] = []
            self.states = [_state(loader)]
            for item in itertools.islice(_steps(loader), steps):
                self.items.append(_plain(item))
                self.states.append(_state(loader))
        finally:
            close = getattr(loader, "close", None)
            if callable(close):
                close()
        if state is not None and self.states[0] != state:
            _fail(
                "its state_dict right after load_state_dict is another",
                f"{self.states[0][:200]} instead of {state[:200]}",
                "let load_state_dict take back all that state_dict gives",
            )


def _steps(loader: Any) -> Iterator[Any]:
    blocks = getattr(loader, "blocks", None)
    return iter(blocks() if callable(blocks) else loader)


def _state(loader: Resumable) -> str:
    """The state as text, so that nothing that the loader does later changes it."""
    state = loader.state_dict()
    try:
        text = json.dumps(state, sort_keys=True)
    except (TypeError, ValueError) as error:
        _fail(
            "its state_dict is not of JSON values",
            str(error),
            "use numbers, text, lists and dicts with text as keys: they fit into any checkpoint",
        )
    if json.loads(text) != dict(state):
        _fail(
            "its state_dict does not come back from JSON as it was",
            f"{dict(state)!r:.200}",
            "use lists instead of tuples, and text as keys",
        )
    if json.dumps(loader.state_dict(), sort_keys=True) != text:
        _fail(
            "its state_dict is another when it is asked twice",
            "asking must not move the loader",
            "compute it from where training stands, not from where prefetching does",
        )
    for rank, other in enumerate(gather_objects(text)):
        if other != text:
            _fail(
                f"its state_dict is another on rank {rank}",
                "one state must serve all ranks",
                "keep in it what all ranks know, not what is a rank's own",
            )
    return text


# ---------------------------------------------------------------------- what a step holds


def _plain(value: Any) -> Any:
    """A step as plain values that compare: tensors as dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return ("tensor", str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
    if isinstance(value, Mapping):
        named = [(str(key), _plain(value[key])) for key in value]
        return ("mapping", named, _attributes(value))
    if isinstance(value, str | bytes | int | float | None):
        return repr(value)
    if isinstance(value, Iterable):
        return ("sequence", [_plain(one) for one in value], _attributes(value))
    return repr(value)


def _attributes(value: Any) -> list[tuple[str, str]]:
    """What a micro-batch says besides its tensors."""
    names = ("uids", "lengths", "scale", "label_tokens", "epoch", "index", "position")
    return [(name, repr(getattr(value, name))) for name in names if _has(value, name)]


def _has(value: Any, name: str) -> bool:
    return not isinstance(value, list | tuple | dict) and hasattr(value, name)


def _uids(item: Any) -> list[str]:
    """The uids anywhere in a step, as text."""
    if not isinstance(item, tuple) or item[0] == "tensor":
        return []
    own = dict(item[2]).get("uids")
    if own is not None:
        inner = own[1:-1]
        return [f"({one})" for one in inner.strip("()").split("), (")] if inner else []
    children = [one[1] for one in item[1]] if item[0] == "mapping" else item[1]
    return [uid for child in children for uid in _uids(child)]


def _once(run: _Run) -> None:
    """No sample twice, on any rank: a uid names one sample of one epoch."""
    own = [uid for item in run.items for uid in _uids(item)]
    counts = Counter(uid for uids in gather_objects(own) for uid in uids)
    twice = sorted(uid for uid, n in counts.items() if n > 1)
    if twice:
        _fail(
            "it gives samples twice in an epoch",
            _some(twice),
            "draw each sample of an epoch once, and give it a uid of its own",
        )


def _apart(found: list[Any], expected: list[Any], before: list[Any]) -> str:
    """In words, how what was found differs from what was expected."""
    ours, theirs = (
        Counter(uid for item in items for uid in _uids(item)) for items in (found, expected)
    )
    past = {uid for item in before for uid in _uids(item)}
    if again := sorted(uid for uid in ours if uid in past):
        return f"it gives samples again that were given before the state: {_some(again)}"
    if lost := sorted((theirs - ours).elements()):
        return f"it leaves samples out: {_some(lost)}"
    if more := sorted((ours - theirs).elements()):
        return f"it gives other samples: {_some(more)}"
    if len(found) != len(expected):
        return f"it gives {len(found)} steps instead of {len(expected)}"
    step = next(n for n, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    if ours and [_uids(item) for item in found] != [_uids(item) for item in expected]:
        return f"it gives the same samples in another order, from its step {step} on"
    return f"its step {step} holds other values"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _fail(what: str, value: str, fix: str) -> NoReturn:
    raise AssertionError(f"the loader cannot be resumed: {what}: {value}. To mend it: {fix}.")
