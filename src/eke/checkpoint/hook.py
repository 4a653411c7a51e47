"""The hook that runs before every optimizer's step, for as long as a capture may need it.

A checkpointer that is dropped without `close` leaves a save behind that is still being captured, so
the hook outlives it: it belongs to the engine, whose threads keep it alive until they are done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from eke.checkpoint.capture import tensors_of
from eke.checkpoint.engine import Engine
from eke.checkpoint.source import storage_of
from eke.distributed import local_of


def hook_steps(
    before_step: Callable[[torch.optim.Optimizer], None], engine: Engine
) -> RemovableHandle:
    """Call a method before every step of every optimizer, as long as its owner lives; after that,
    wait for what is left to be captured.

    Args:
        before_step: a bound method; its owner is not kept alive.
        engine: the owner's; kept alive by its threads, not by this.
    """
    owner, left_behind, home = weakref.WeakMethod(before_step), weakref.ref(engine), engine.home

    # A compiled step would be traced through the engine, and compiled anew at every save.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not home.here:
            return  # a forked child trains on a copy of its own, and has not the engine's threads
        before = owner()
        if before is not None:
            before(optimizer)
        elif (left := left_behind()) is not None:
            wait_for(left, optimizer)

    return register_optimizer_step_pre_hook(hook)


def wait_for(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Wait until all that a step of an optimizer changes is captured."""
    engine.barrier(lambda: {storage_of(local_of(tensor)) for tensor in tensors_of(optimizer)})


def let_go(engine: Engine, hook: RemovableHandle) -> None:
    """The owner is gone: what is in flight is finished, and the threads end.

    The hook stays if something is in flight. It does nothing once the engine is gone, and is not
    removed then: that would be from another thread, in the middle of what an optimizer iterates
    over.
    """
    engine.stop()
    if engine.home.here and not engine._tasks:
        hook.remove()
