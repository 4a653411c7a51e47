"""The ranks of a loader, and how a fault on one of them becomes an error on all.

Property: all ranks that call `Ranks.agree` together either all return or all raise the same
kind of error with the same text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eke.distributed import gather_objects, world
from eke.errors import EkeError, InputError


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks, and how they exchange JSON values.

    `exchange` is a collective that returns every rank's value, in rank order.
    """

    rank: int
    size: int
    exchange: Callable[[Any], list[Any]]

    @classmethod
    def of_job(cls) -> Ranks:
        """The ranks of the torch.distributed job, or this process alone.

        Raises:
            InputError: the environment describes a job that this process has not joined.
        """
        here = world()
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1 and here.size != size:
            raise InputError(
                f"WORLD_SIZE is {size} but this process has not joined the other ranks",
                rule="alone, every rank would train on all samples",
                fix="Call eke.distributed.world.init() before you build the loader",
            )
        return cls(here.rank, here.size, gather_objects)

    def agree(
        self, header: Mapping[str, Any], content: Mapping[str, Any], fault: EkeError | None = None
    ) -> list[dict[str, Any]]:
        """Every rank's content, if no rank has a fault and all headers are equal.

        Raises:
            InputError: the headers differ, or the fault is an `InputError`.
            EkeError: some rank has a fault; the lowest such rank and its fault are named.
        """
        message = {"header": dict(header), "content": dict(content)}
        if fault is not None:
            message["fault"] = {"text": str(fault), "input": isinstance(fault, InputError)}
        replies = self.exchange(message)
        for rank, reply in enumerate(replies):
            if "fault" in reply:
                kind = InputError if reply["fault"]["input"] else EkeError
                text = reply["fault"]["text"]
                raise kind(text if self.size == 1 else f"rank {rank} of {self.size}: {text}")
        first = replies[0]["header"]
        for rank, reply in enumerate(replies):
            differing = {k: v for k, v in reply["header"].items() if first.get(k) != v}
            if differing:
                raise InputError(
                    f"the loaders of rank 0 and rank {rank} differ",
                    value=differing,
                    rule=f"rank 0 has { ({k: first.get(k) for k in differing})!r}",
                    fix="Give all ranks the same data, the same settings and the same state",
                )
        return [reply["content"] for reply in replies]
