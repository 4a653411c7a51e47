"""The only user of `torch.distributed`: the job's ranks, and small objects between them."""

from eke.distributed.keyvalue import Store
from eke.distributed.world import (
    World,
    barrier,
    gather_objects,
    gloo_available,
    init,
    shutdown,
    store,
    world,
    wrap,
)

__all__ = [
    "Store",
    "World",
    "barrier",
    "gather_objects",
    "gloo_available",
    "init",
    "shutdown",
    "store",
    "world",
    "wrap",
]
