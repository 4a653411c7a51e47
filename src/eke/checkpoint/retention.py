"""Which committed checkpoints to delete: a pure function over their steps.

Properties, for every set of steps, where a step is *sound* unless it is known to be damaged: the
newest `last` sound steps stay, and whatever is newer than the newest of them; every multiple of
`every` and every protected step stays; all others go. So the newest sound step always stays, and
if none is sound nothing goes. Applying the rule twice deletes nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from eke.errors import InputError


@dataclass(frozen=True)
class Keep:
    """What to keep: the newest `last` steps, and every step that `every` divides.

    Args:
        last: at least 1, so that no rule can leave nothing.
        every: a number of steps (1000 or "1000 steps"), or None.

    Raises:
        InputError: `last` or `every` is not what it must be.
    """

    last: int = 3
    every: int | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.last, bool) or not isinstance(self.last, int) or self.last < 1:
            raise InputError(
                "the number of checkpoints to keep is wrong",
                value=self.last,
                rule="`last` is a whole number of at least 1",
                fix="Write Keep(last=3), for example",
            )
        _ = self.every_steps

    @property
    def every_steps(self) -> int | None:
        """`every` as a number of steps."""
        every: object = self.every
        if every is None:
            return None
        if isinstance(every, str):
            match = re.fullmatch(r"\s*(\d+)\s*(?:steps?)?\s*", every)
            every = int(match[1]) if match else every
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(
                "the interval of checkpoints to keep is wrong",
                value=self.every,
                rule="`every` is None, a whole number of at least 1, or text such as '1000 steps'",
                fix="Write Keep(every=1000), for example",
            )
        return every


def expired(
    steps: Iterable[int],
    keep: Keep,
    protected: Collection[int] = (),
    sound: Callable[[int], bool] = lambda step: True,
) -> list[int]:
    """The steps to delete, oldest first.

    Args:
        steps: the committed ones.
        keep: the rule.
        protected: steps that stay whatever the rule says.
        sound: whether a step can be restored, as far as is known. Asked of the newest steps only,
            and of no more than are needed.
    """
    ordered = sorted(set(steps), reverse=True)
    if len(ordered) <= keep.last:
        return []
    every = keep.every_steps
    kept: list[int] = []
    for step in ordered:
        if len(kept) == keep.last:
            break
        if sound(step):
            kept.append(step)
    return [
        step
        for step in reversed(ordered)
        if kept
        and step < kept[0]
        and step not in kept
        and step not in protected
        and (every is None or step % every != 0)
    ]
