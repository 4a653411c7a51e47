"""Is a user's own `StateProvider` one? Checked by saving it for good and restoring it.

Everything goes through a real `Checkpointer` and a real directory, so what holds here holds in
training. Every violation is one `AssertionError` that says what to change.
"""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import xxhash

from eke.checkpoint.capture import GROUP
from eke.checkpoint.checkpointer import Checkpointer
from eke.checkpoint.objects import canonical, encode
from eke.checkpoint.providers import Fit, Saved, Segment, Spec, StateProvider
from eke.checkpoint.tensors import as_bytes, dtype_name, identity, refuse_unusual
from eke.distributed import gather_objects, world
from eke.errors import EkeError, InputError

NAME = "provider"
PROTOCOL = ("segments", "state", "fit", "load")


class _Bits(NamedTuple):
    """All that a provider owns, as bytes."""

    tensors: dict[str, tuple[Spec, bytes]]
    tree: str
    inner: dict[str, tuple[Spec, bytes]]


def assert_provider(
    provider: StateProvider,
    *,
    fresh: Callable[[], StateProvider] | None = None,
    disturb: Callable[[], object] | None = None,
    forward: Callable[[], object] | None = None,
) -> None:
    """Check that a provider does all that `StateProvider` promises.

    It is saved, then restored into another state, and compared bit for bit. With several ranks this
    is a collective, and what is not `per_rank` is compared between them.

    Args:
        provider: with a state that is worth saving: after a few steps of training, say.
        fresh: makes a provider of a state that was just built, to restore into; or
        disturb: changes the state, tensors and all else, so that it can be restored in place.
        forward: what training does between a save and the next `optimizer.step()`, a forward and a
            backward pass: segments that are not eager must be as they were afterwards.

    Raises:
        AssertionError: the provider breaks a promise; the message says which, and what to change.
        InputError: neither `fresh` nor `disturb` is given, or it changes nothing.
    """
    if (fresh is None) == (disturb is None):
        raise InputError(
            "a provider is restored into another state than the one that was saved",
            rule="give either fresh=, which makes a new provider, or disturb=, which changes it",
        )
    check = _Check(provider)
    check.shape()
    saved = check.bits()
    if check.bits() != saved:
        check.fail("state()", "returns something else the second time, though nothing happened")
    check.ranks(saved)
    if forward is not None:
        check.forward(forward)
        saved = check.bits()
    with _shared_directory() as root:
        with check.machinery("save"), Checkpointer(root, pool="1MiB") as writer:
            writer.attach(extra={NAME: provider})
            writer.save(0).wait()
        target = check
        if fresh is not None:
            target = _Check(fresh())
            target.shape()
        elif disturb is not None:
            disturb()
        if target.bits() == saved:
            raise InputError(
                "what is restored into is what was saved, so restoring it would prove nothing",
                fix="Let fresh() or disturb() give other values, to tensors and to all else",
            )
        _restore(target, saved, root)


def _restore(target: _Check, saved: _Bits, root: Path) -> None:
    watch = _Watch(target)
    with target.machinery("load"), Checkpointer(root) as reader:
        reader.attach(extra={NAME: watch})
        report = reader.restore(strict=False)
    assert report is not None
    for sort in ("missing", "unexpected", "mismatched"):
        if names := getattr(report, sort):
            target.fail("fit()", f"calls {names[0]} {sort} in a state of its own making")
    now = target.bits()
    for key in saved.tensors.keys() | now.tensors.keys():
        if key not in now.tensors:
            target.fail("load()", f"loses the segment {key!r}: create it with saved.read({key!r})")
        if key not in saved.tensors:
            target.fail(
                "load()",
                f"leaves the segment {key!r} behind, which the saved state does not have: remove "
                "what saved.tensors does not list",
            )
        if now.tensors[key][0] != saved.tensors[key][0]:
            target.fail(
                "load()",
                f"makes the segment {key!r} {now.tensors[key][0]}; it was {saved.tensors[key][0]}",
            )
        if now.tensors[key] != saved.tensors[key]:
            target.fail(
                "load()",
                f"does not bring back the bits of the segment {key!r}: call "
                f"saved.copy_into({key!r}, the live tensor)",
            )
    if now[1:] != saved[1:]:
        target.fail(
            "load()",
            "does not bring back what state() returned: take all of saved.state, and drop what it "
            "does not have",
        )
    gc.collect()
    if watch.saved is not None and watch.saved() is not None:
        target.fail("load()", "keeps what it was given alive: copy what you need, keep nothing")


class _Check:
    """One provider, and how its violations are told."""

    def __init__(self, provider: StateProvider) -> None:
        self.provider = provider
        self.name = type(provider).__name__

    def fail(self, where: str, why: str) -> NoReturn:
        raise AssertionError(f"{self.name}.{where} {why}")

    @contextmanager
    def machinery(self, doing: str) -> Iterator[None]:
        """What saving and restoring refuse is the provider's doing here."""
        try:
            yield
        except EkeError as error:
            raise AssertionError(f"{self.name}: {doing} failed: {error}") from error

    def shape(self) -> None:
        """The protocol itself, and the segments: their names, groups, kinds and stability."""
        for method in PROTOCOL:
            if not callable(getattr(self.provider, method, None)):
                self.fail(method, "is missing: a StateProvider has it as a method")
        if not isinstance(getattr(self.provider, "per_rank", None), bool):
            self.fail("per_rank", "is not True or False: does every rank have a state of its own?")
        first = self.segments()
        for segment in first:
            self._segment(segment)
        keys = [segment.key for segment in first]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            self.fail("segments()", f"has two tensors of the key {twice[0]!r}: name them apart")
        again = {segment.key: segment for segment in self.segments()}
        if again.keys() != set(keys):
            other = sorted(again.keys() ^ set(keys))[0]
            self.fail("segments()", f"does not have {other!r} each time: keys must be stable")
        for segment in first:
            self._same(segment, again[segment.key])

    def segments(self) -> list[Segment]:
        found: object = self.provider.segments()
        if isinstance(found, Sequence) and all(isinstance(one, Segment) for one in found):
            return list(found)
        self.fail("segments()", "does not return a list of Segment(key, tensor, group, eager)")

    def _segment(self, one: Segment) -> None:
        if not isinstance(one.key, str) or not one.key:
            self.fail("segments()", f"has the key {one.key!r}: keys are text, and not empty")
        tensor: object = one.tensor
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            self.fail("segments()", f"has a {kind} as {one.key!r}: return it in state() instead")
        try:
            refuse_unusual(one.tensor, one.key)
        except InputError as error:
            self.fail("segments()", f"has what a checkpoint cannot hold: {error}")
        if not isinstance(one.group, str) or GROUP.fullmatch(one.group) is None:
            self.fail(
                "segments()",
                f"has the group {one.group!r} for {one.key!r}: use a-z, 0-9, _ and -, at most 64",
            )
        if not isinstance(one.eager, bool):
            self.fail("segments()", f"has eager={one.eager!r} for {one.key!r}: say True or False")

    def _same(self, a: Segment, b: Segment) -> None:
        if (a.group, a.eager) != (b.group, b.eager):
            self.fail("segments()", f"gives {a.key!r} another group or eager flag each time")
        if identity(a.tensor) != identity(b.tensor):
            self.fail(
                "segments()",
                f"gives other memory for {a.key!r} each time: give the live tensor, not a copy",
            )

    def bits(self) -> _Bits:
        try:
            tree, inner = encode(self.provider.state(), NAME)
        except InputError as error:
            self.fail("state()", f"returns what a checkpoint cannot hold: {error}")
        return _Bits(
            {one.key: _bits(one.tensor) for one in self.segments()},
            canonical(tree),
            {name: _bits(tensor) for name, tensor in inner.items()},
        )

    def forward(self, forward: Callable[[], object]) -> None:
        """What is not eager is as it was after a forward pass."""
        before = {one.key: one for one in self.segments() if not one.eager}
        bits = {key: _bits(one.tensor) for key, one in before.items()}
        forward()
        after = {one.key: one.tensor for one in self.segments()}
        for key, one in before.items():
            moved = key not in after or identity(after[key]) != identity(one.tensor)
            if moved or _bits(after[key]) != bits[key]:
                self.fail(
                    "segments()",
                    f"says eager=False of {key!r}, but a forward pass changes it: say eager=True, "
                    "or nothing",
                )

    def ranks(self, bits: _Bits) -> None:
        """What all ranks are said to hold alike, they do."""
        if self.provider.per_rank or world().size == 1:
            return
        own = {key: xxhash.xxh3_128_hexdigest(data) for key, (_, data) in bits.tensors.items()}
        for rank, other in enumerate(gather_objects(own)):
            if different := sorted(k for k in own.keys() | other if own.get(k) != other.get(k)):
                self.fail(
                    "per_rank",
                    f"is False, but rank {rank} has another {different[0]!r} than rank "
                    f"{world().rank}: say True if every rank's state is its own",
                )


class _Watch:
    """The provider between the checkpointer and the one that is checked."""

    def __init__(self, check: _Check) -> None:
        self.check, self.per_rank = check, check.provider.per_rank
        self.saved: weakref.ref[Saved] | None = None

    def segments(self) -> Sequence[Segment]:
        return self.check.segments()

    def state(self) -> object:
        return self.check.provider.state()

    def fit(self, saved: Saved) -> Fit:
        before = self.check.bits()
        fit = self.check.provider.fit(saved)
        if not isinstance(fit, Fit):
            self.check.fail("fit()", f"returns a {type(fit).__name__}: return a Fit")
        for one in fields(Fit):
            if not isinstance(getattr(fit, one.name), list):
                self.check.fail("fit()", f"has no list of names as {one.name!r}")
        if self.check.bits() != before:
            self.check.fail("fit()", "changes the state: it only compares, load() takes it back")
        return fit

    def load(self, saved: Saved) -> None:
        self.saved = weakref.ref(saved)
        self.check.provider.load(saved)


def _bits(tensor: torch.Tensor) -> tuple[Spec, bytes]:
    return Spec(dtype_name(tensor.dtype), tuple(tensor.shape)), bytes(as_bytes(tensor))


@contextmanager
def _shared_directory() -> Iterator[Path]:
    """A directory of rank 0's, for all ranks, until all of them have left it."""
    with tempfile.TemporaryDirectory(prefix="eke-provider-") as own:
        yield Path(gather_objects(own)[0])
        gather_objects(None)
