"""Who owns which piece of training state, and how it is taken and given back.

A provider names its live tensors as segments and returns everything else as one object (see
`objects` for what that may be made of). Restoring has two halves: `fit` compares, and changes
nothing; `load` takes the state back, in place where there is something to take it into.
The provider of an optimizer is in `optimizer_state`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from eke.checkpoint.reader import Fill
from eke.checkpoint.tensors import require_place
from eke.distributed import reshard
from eke.errors import InputError

STATE, FROZEN, OTHER = "state", "frozen", "other"
BUFFERS, OBJECTS = "buffers", "objects"
"""Groups: tensors that change together lie in one file of their own. `objects` has the tensors
that are inside objects, `other` what was to be in `state` but is no optimizer's."""


class Segment(NamedTuple):
    """A live tensor of a provider.

    Attributes:
        key: its name within the provider.
        tensor: the live tensor itself; of a DTensor each rank saves what it holds.
        group: what it changes with; part of a file's name.
        eager: whether anything but a `torch.optim` optimizer's `step()` may change it, a forward
            pass for example. It is then captured before `save` returns; else while training goes
            on, and whatever else changes it must call `Checkpointer.barrier` first.
    """

    key: str
    tensor: torch.Tensor
    group: str = STATE
    eager: bool = True


class Spec(NamedTuple):
    """What a saved tensor is: torch's dtype name, and the whole shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A provider's part of a checkpoint.

    Attributes:
        tensors: what its segments were, by key.
        state: what its `state()` returned.
        read: a new CPU tensor with a segment's contents, hashes checked.
        copy_into: the same, into a live tensor of equal shape on any device; into a DTensor, what
            this rank holds of it.
        fill: many of the latter at once, in parallel; also parts of a segment.
        content: equal for two segments whose values are equal bit for bit.
        cast: whether live tensors of another floating-point type are to be filled too.
    """

    tensors: Mapping[str, Spec]
    state: Any
    read: Callable[[str], torch.Tensor]
    copy_into: Callable[[str, torch.Tensor], None]
    fill: Callable[[Sequence[Fill]], None]
    content: Callable[[str], Hashable]
    cast: bool = False

    def takes(self, key: str, live: torch.Tensor) -> bool:
        """Whether a live tensor can take a segment: same shape, and same or castable dtype."""
        return _alike(self.tensors[key], live, self.cast)


@dataclass
class Fit:
    """Where saved and live state differ; names within the provider, "" for all of it.

    `left_alone` is what stays as it is now without this being a difference of the two states, such
    as the generators of a GPU that this machine does not have. `notes` are sentences that say to a
    user what the differences mean.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@runtime_checkable
class StateProvider(Protocol):
    """The owner of one piece of training state.

    `per_rank` says that every rank's state is its own and that the ranks' states differ by
    design; it is then restored only into a job of the same size.
    """

    per_rank: bool

    def segments(self) -> Sequence[Segment]:
        """The live tensors. Asked anew at every save and restore."""
        ...

    def state(self) -> object:
        """Everything else, as an object that `objects.encode` takes; None for nothing."""
        ...

    def fit(self, saved: Saved) -> Fit:
        """How the saved state would fit. Changes nothing."""
        ...

    def load(self, saved: Saved) -> None:
        """Take back what fits."""
        ...


def _alike(saved: Spec, live: torch.Tensor, cast: bool) -> bool:
    dtype = getattr(torch, saved.dtype)
    assert isinstance(dtype, torch.dtype)
    castable = cast and dtype.is_floating_point and live.is_floating_point()
    return (dtype == live.dtype or castable) and saved.shape == tuple(live.shape)


def compare(
    saved: Mapping[str, Spec], live: Mapping[str, torch.Tensor], *, cast: bool = False
) -> Fit:
    """The fit of saved segments and live tensors by name, dtype and shape.

    With `cast`, two floating-point types fit one another.

    Raises:
        InputError: a live tensor has no memory, or is a DTensor that nothing can be restored into.
    """
    fit = Fit(
        missing=sorted(live.keys() - saved.keys()), unexpected=sorted(saved.keys() - live.keys())
    )
    for key in sorted(saved.keys() & live.keys()):
        require_place(live[key], key)
        if not _alike(saved[key], live[key], cast):
            fit.mismatched.append(key)
    return fit


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel and torch.compile, whose names it keeps."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


class ModuleProvider:
    """A module's parameters and persistent buffers, and its `get_extra_state` objects.

    Parameters that need no gradient form the group "frozen", buffers the group "buffers". Buffers
    are captured eagerly, because a forward pass may change them; so is everything inside torch's
    first FullyShardedDataParallel, whose memory comes and goes.
    """

    per_rank = False

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = unwrap(module)

    def _split(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        tensors: dict[str, torch.Tensor] = {}
        extra: dict[str, object] = {}
        reshard(self.module)
        own = {id(p) for p in self.module.parameters()} | {id(b) for b in self.module.buffers()}
        for key, value in self.module.state_dict(keep_vars=True).items():
            if key.endswith("_extra_state"):
                extra[key] = value
            elif id(value) in own:
                tensors[key] = value
            else:
                raise InputError(
                    f"the module's state_dict() has {key!r}, which is none of its parameters or "
                    "buffers, so it cannot be restored in place",
                    fix="Attach the module through a StateProvider of its own",
                )
        return tensors, extra

    def segments(self) -> Sequence[Segment]:
        """Parameters and persistent buffers, by their names in `state_dict()`."""
        comes_and_goes = any(
            type(part).__name__ == "FullyShardedDataParallel" for part in self.module.modules()
        )
        found = []
        for key, tensor in self._split()[0].items():
            if isinstance(tensor, torch.nn.Parameter):
                group = STATE if tensor.requires_grad else FROZEN
                found.append(Segment(key, tensor, group, eager=comes_and_goes))
            else:
                found.append(Segment(key, tensor, BUFFERS))
        return found

    def state(self) -> object:
        """The extra states by name, or None."""
        return self._split()[1] or None

    def fit(self, saved: Saved) -> Fit:
        """By name, dtype and shape."""
        tensors, extra = self._split()
        fit = compare(saved.tensors, tensors, cast=saved.cast)
        stored = saved.state or {}
        fit.missing += sorted(extra.keys() - stored.keys())
        fit.unexpected += sorted(stored.keys() - extra.keys())
        first: dict[int, str] = {}
        for key in sorted(saved.tensors.keys() & tensors.keys() - set(fit.mismatched)):
            one = first.setdefault(id(tensors[key]), key)
            if saved.content(one) != saved.content(key):
                fit.mismatched += sorted({one, key} - set(fit.mismatched))
                fit.notes.append(
                    f"{one} and {key} are one tensor now, and were two with own values"
                )
        return fit

    def load(self, saved: Saved) -> None:
        """Copy into the live tensors; a tensor with several names is copied once."""
        tensors, extra = self._split()
        skip = set(self.fit(saved).mismatched)
        wanted = {
            id(tensor): Fill(key, tensor)
            for key, tensor in reversed(tensors.items())
            if key in saved.tensors and key not in skip
        }
        saved.fill(list(wanted.values()))
        for key, value in (saved.state or {}).items():
            if key in extra:
                owner = key.removesuffix("_extra_state").removesuffix(".")
                self.module.get_submodule(owner).set_extra_state(value)


@runtime_checkable
class Stateful(Protocol):
    """Anything with torch's pair of methods."""

    def state_dict(self) -> Any:
        """The state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take it back."""
        ...


class ObjectProvider:
    """A state that one function returns and another takes back, whole."""

    def __init__(
        self, get: Callable[[], object], set: Callable[[Any], object], *, per_rank: bool = False
    ) -> None:
        self._get, self._set, self.per_rank = get, set, per_rank

    @classmethod
    def of(cls, owner: Stateful) -> ObjectProvider:
        """Of anything with `state_dict` and `load_state_dict`."""
        return cls(owner.state_dict, owner.load_state_dict)

    @classmethod
    def of_value(cls, value: dict[Any, Any] | list[Any]) -> ObjectProvider:
        """Of a dict or list, whose contents are replaced when it is restored."""

        def put(saved: Any) -> None:
            if type(saved) is not type(value):
                raise InputError(
                    f"the checkpoint has a {type(saved).__name__} where a {type(value).__name__} "
                    "is attached",
                    fix=f"Attach a {type(saved).__name__}, or restore the rest with only=",
                )
            if isinstance(value, dict):
                value.clear()
                value.update(saved)
            else:
                value[:] = saved

        return cls(lambda: value, put)

    def segments(self) -> Sequence[Segment]:
        """None: tensors inside the object are found when it is encoded."""
        return ()

    def state(self) -> object:
        """What `get` returns."""
        return self._get()

    def fit(self, saved: Saved) -> Fit:
        """Always: only the owner can tell, when it takes the state back."""
        return Fit()

    def load(self, saved: Saved) -> None:
        """Give `set` the saved state."""
        self._set(saved.state)


class RngProvider:
    """This process's random generators: Python's, numpy's global one, torch's, and CUDA's."""

    per_rank = True

    def segments(self) -> Sequence[Segment]:
        """None: generator states are small and belong to the object."""
        return ()

    def state(self) -> object:
        """Each generator's own form of its state; CUDA's for every device, if it is in use."""
        cuda = torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 (whoever uses it needs it back)
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if cuda else [],
        }

    @staticmethod
    def _cuda_fits(saved: Saved) -> bool:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return len(saved.state["cuda"]) in (0, count)

    def fit(self, saved: Saved) -> Fit:
        """Fits everywhere, but for CUDA states of another number of devices."""
        return Fit(left_alone=[] if self._cuda_fits(saved) else ["cuda"])

    def load(self, saved: Saved) -> None:
        """Set every generator to its saved state."""
        random.setstate(saved.state["python"])
        np.random.set_state(saved.state["numpy"])  # noqa: NPY002
        torch.set_rng_state(saved.state["torch"])
        if saved.state["cuda"] and self._cuda_fits(saved):
            torch.cuda.set_rng_state_all(saved.state["cuda"])


def provider_of(value: object, name: str) -> StateProvider:
    """The provider for something that a user attached as `extra`.

    Raises:
        InputError: there is none for its type.
    """
    is_class = isinstance(value, type)  # which has the methods, and no state
    if isinstance(value, StateProvider) and not is_class:
        return value
    if isinstance(value, torch.nn.Module):
        return ModuleProvider(value)
    if isinstance(value, Stateful) and not is_class:
        return ObjectProvider.of(value)
    if isinstance(value, (dict, list)):
        return ObjectProvider.of_value(value)
    raise InputError(
        f"{name!r} cannot be attached: a {type(value).__name__} has no state to restore",
        rule="attach an object with state_dict and load_state_dict, a dict, a list, or a provider",
        fix="Wrap it: eke.checkpoint.ObjectProvider(get, set)",
    )
