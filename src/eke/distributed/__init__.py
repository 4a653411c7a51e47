"""The only user of `torch.distributed`: the job's ranks, small objects between them, and tensors
that are spread over them."""

from eke.distributed.channel import Channel
from eke.distributed.gradients import average_gradients
from eke.distributed.keyvalue import Store
from eke.distributed.sharding import (
    Box,
    Part,
    any_dtensor,
    empty_beside,
    is_dtensor,
    local_of,
    mesh_of,
    part_of,
    reshard,
)
from eke.distributed.world import (
    World,
    barrier,
    gather_objects,
    gloo_available,
    init,
    ranks_around,
    shutdown,
    store,
    world,
    wrap,
)

__all__ = [
    "Box",
    "Channel",
    "Part",
    "Store",
    "World",
    "any_dtensor",
    "average_gradients",
    "barrier",
    "empty_beside",
    "gather_objects",
    "gloo_available",
    "init",
    "is_dtensor",
    "local_of",
    "mesh_of",
    "part_of",
    "ranks_around",
    "reshard",
    "shutdown",
    "store",
    "world",
    "wrap",
]
