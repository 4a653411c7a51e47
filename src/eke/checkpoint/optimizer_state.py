"""An optimizer's state, saved and restored by parameter name.

A state tensor of a parameter is the segment `PARAMETER/KEY`, for example
`layers.0.weight/exp_avg`, with its own dtype (Adam's `step` too). The object holds the rest:

    {"class": "AdamW", "tensors": {PARAMETER: [KEY..]}, "values": {PARAMETER: {KEY: value}},
     "shared": {KEY: value}, "groups": [{"names": [PARAMETER..], "options": {KEY: value}}..]}

so neither the order of parameters nor their numbers matter when it is restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eke.checkpoint.providers import STATE, Fit, Saved, Segment, unwrap
from eke.checkpoint.reader import Fill
from eke.checkpoint.tensors import copy_exactly, require_place
from eke.distributed import empty_beside, reshard
from eke.errors import InputError

NAMES = "param_names"
"""The key under which torch itself keeps names in a group, for an optimizer built with them."""


class OptimizerProvider:
    """A `torch.optim.Optimizer`.

    Args:
        optimizer: whose state it is.
        model: whose `named_parameters` name the state; without one, the optimizer must have been
            built from named parameters.
    """

    per_rank = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None
    ) -> None:
        self.optimizer = optimizer
        self.model = unwrap(model) if model is not None else None

    def _names(self) -> dict[torch.Tensor, str]:
        """Every parameter of the optimizer -> its name."""
        known: dict[torch.Tensor, str] = {}
        if self.model is not None:
            reshard(self.model)  # else FSDP2 may show whole parameters that the optimizer never saw
            known = {parameter: name for name, parameter in self.model.named_parameters()}
        names: dict[torch.Tensor, str] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            own = group.get(NAMES) or [None] * len(group["params"])
            for place, (parameter, stated) in enumerate(zip(group["params"], own, strict=True)):
                name = known.get(parameter, stated)
                if name is None:
                    raise InputError(
                        f"parameter {place} of the optimizer's group {index}, of shape "
                        f"{tuple(parameter.shape)}, is not one of the attached model's, so it has "
                        "no name",
                        fix="Attach the model that the optimizer updates, or build the optimizer "
                        "from model.named_parameters()",
                    )
                names[parameter] = name
        if len(set(names.values())) != len(names):
            raise InputError(
                "two of the optimizer's parameters have one name",
                fix="Build it from model.named_parameters() of one model",
            )
        return names

    def segments(self) -> Sequence[Segment]:
        """Every tensor that is a direct value of a parameter's state."""
        return [
            Segment(f"{name}/{key}", value, STATE, eager=False)
            for parameter, name in self._names().items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        ]

    def state(self) -> dict[str, Any]:
        """The object in the module's docstring."""
        names = self._names()
        tensors: dict[str, list[str]] = {}
        values: dict[str, dict[str, object]] = {}
        for parameter, name in names.items():
            if parameter in self.optimizer.state:
                state = self.optimizer.state[parameter]
                tensors[name] = [k for k, v in state.items() if isinstance(v, torch.Tensor)]
                values[name] = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
        return {
            "class": type(self.optimizer).__name__,
            "tensors": tensors,
            "values": values,
            "shared": {k: v for k, v in self.optimizer.state.items() if k not in names},
            "groups": [
                {
                    "names": [names[parameter] for parameter in group["params"]],
                    "options": {k: v for k, v in group.items() if k not in ("params", NAMES)},
                }
                for group in self.optimizer.param_groups
            ],
        }

    def _groups(self, saved: Saved) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(live group, saved group) pairs of the groups with the same parameters."""
        names = self._names()
        stored = {frozenset(group["names"]): group for group in saved.state["groups"]}
        pairs = []
        for group in self.optimizer.param_groups:
            found = stored.get(frozenset(names[p] for p in group["params"]))
            if found is not None:
                pairs.append((group, found))
        return pairs

    def fit(self, saved: Saved) -> Fit:
        """By class, parameter name and the parameters that share a group."""
        kind, stored = type(self.optimizer).__name__, saved.state["class"]
        if kind != stored:
            return Fit(mismatched=[f"(the checkpoint has {stored}, this is {kind})"])
        names = self._names()
        for parameter, name in names.items():
            require_place(parameter, name)
        live = set(names.values())
        there = {name for group in saved.state["groups"] for name in group["names"]}
        fit = Fit(missing=sorted(live - there), unexpected=sorted(there - live))
        if fit.missing:
            fit.notes.append(
                f"the optimizer updates {fit.missing[0]} now, which was frozen or did not exist "
                "when this was saved"
            )
        if fit.unexpected:
            fit.notes.append(
                f"the optimizer no longer updates {fit.unexpected[0]}: it is frozen now, or gone"
            )
        if not fit.missing and not fit.unexpected:
            pairs = len(self._groups(saved))
            if pairs != len(self.optimizer.param_groups) or pairs != len(saved.state["groups"]):
                fit.mismatched.append("(its parameter groups are split differently)")
        return fit

    def load(self, saved: Saved) -> None:
        """Replace the state of every parameter that the checkpoint knows; others keep theirs.

        Live state tensors of the right dtype and shape are filled in place; absent ones are
        created where torch would have: next to the parameter, but for a `step` that the optimizer
        keeps on the CPU.
        """
        if type(self.optimizer).__name__ != saved.state["class"]:
            return
        there = {name for group in saved.state["groups"] for name in group["names"]}
        names = self._names()
        states: dict[torch.Tensor, dict[Any, Any] | None] = {}
        wanted: list[Fill] = []
        for group in self.optimizer.param_groups:
            step_on_device = bool(group.get("capturable")) or bool(group.get("fused"))
            for parameter in group["params"]:
                if (name := names[parameter]) in there:
                    fills = self._fills(parameter, name, saved, step_on_device)
                    wanted += fills.values()
                    states[parameter] = None
                    if name in saved.state["tensors"]:  # else it had not been updated yet
                        tensors = {key: fill.target for key, fill in fills.items()}
                        states[parameter] = {**tensors, **saved.state["values"][name]}
        saved.fill(wanted)
        # Nothing of the old state is let go before the new one is there.
        for parameter, state in states.items():
            if state is None:
                self.optimizer.state.pop(parameter, None)
            else:
                self.optimizer.state[parameter] = state
        for key in [key for key in self.optimizer.state if key not in names]:
            del self.optimizer.state[key]
        for key, value in saved.state["shared"].items():
            self.optimizer.state[key] = value
        for live, stored in self._groups(saved):
            for key, value in stored["options"].items():
                now = live.get(key)
                if isinstance(now, torch.Tensor) and _same_kind(now, value):
                    copy_exactly(now, value)  # a scheduler may hold this very tensor
                else:
                    live[key] = value

    def _fills(
        self, parameter: torch.Tensor, name: str, saved: Saved, step_on_device: bool
    ) -> dict[str, Fill]:
        """What of a parameter's state is to be read into which tensor, live or new, by key."""
        old = self.optimizer.state.get(parameter, {})
        fills: dict[str, Fill] = {}
        for key in saved.state["tensors"].get(name, ()):
            full, tensor = f"{name}/{key}", old.get(key)
            if not isinstance(tensor, torch.Tensor) or not saved.takes(full, tensor):
                spec = saved.tensors[full]
                dtype = getattr(torch, spec.dtype)
                assert isinstance(dtype, torch.dtype)
                if saved.cast and key != "step" and _floating(dtype, parameter):
                    dtype = parameter.dtype  # as torch's own load_state_dict has it
                on_cpu = key == "step" and not step_on_device
                device = torch.device("cpu") if on_cpu else None
                tensor = empty_beside(parameter, dtype, spec.shape, device)
            fills[key] = Fill(full, tensor)
        return fills


def _floating(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    return dtype.is_floating_point and tensor.is_floating_point()


def _same_kind(now: torch.Tensor, value: object) -> bool:
    return isinstance(value, torch.Tensor) and now.dtype == value.dtype and now.shape == value.shape
