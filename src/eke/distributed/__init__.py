"""The only user of `torch.distributed`: the job's ranks, and small objects between them."""

from eke.distributed.world import (
    World,
    barrier,
    gather_objects,
    gloo_available,
    init,
    shutdown,
    world,
    wrap,
)

__all__ = [
    "World",
    "barrier",
    "gather_objects",
    "gloo_available",
    "init",
    "shutdown",
    "world",
    "wrap",
]
