"""The object of an optimizer that has the parameters it had, without naming them all again."""

from __future__ import annotations

from eke.checkpoint.objects import Ready, encode
from eke.checkpoint.optimizer_state import NAMES, OptimizerProvider


class Remembered:
    """What of `OptimizerProvider.state` stays as long as no tensor comes, goes or is renamed.

    Property: until then `encode(state(), name)` and `encode(provider.state(), name)` are equal.
    """

    def __init__(self, provider: OptimizerProvider) -> None:
        self._provider = provider
        whole = provider.state()
        self._tensors = Ready(encode(whole["tensors"], "")[0])
        self._names = [Ready(encode(group["names"], "")[0]) for group in whole["groups"]]
        # Plain numbers per parameter may change at every step.
        self._steady = not whole["shared"] and not any(whole["values"].values())
        self._values = Ready(encode(whole["values"], "")[0] if self._steady else None)

    def state(self) -> object:
        """The optimizer's object, as it is now."""
        if not self._steady:
            return self._provider.state()
        optimizer = self._provider.optimizer
        return {
            "class": type(optimizer).__name__,
            "tensors": self._tensors,
            "values": self._values,
            "shared": {},
            "groups": [
                {
                    "names": names,
                    "options": {k: v for k, v in group.items() if k not in ("params", NAMES)},
                }
                for names, group in zip(self._names, optimizer.param_groups, strict=True)
            ],
        }
