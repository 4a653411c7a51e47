"""Which part of a tensor this rank holds.

A DTensor is one tensor that is spread over the ranks of a mesh; anything else is held whole. What a
rank has of a tensor is a *box*: `shape` elements from `offset` on. `cut` says which one, for plain
data; the rest reads that data from live tensors.

Properties, for every shape, mesh and placement: the boxes of all coordinates that differ cover the
tensor exactly once; coordinates that differ only in dimensions without a split have the same box;
and the box is what torch itself put there. A part that is no box is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from eke.distributed.world import world
from eke.errors import InputError


class Box(NamedTuple):
    """`shape` elements from `offset` on, one number for each dimension of the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Split(NamedTuple):
    """How one dimension of a mesh splits a tensor.

    Attributes:
        dim: the tensor's dimension.
        pieces: in how many pieces that dimension is cut before each piece is split; more than one
            where a later dimension of the mesh was the first to split (FSDP over tensor
            parallelism; torch's `_StridedShard`).
    """

    dim: int
    pieces: int = 1


class Part(NamedTuple):
    """What this rank holds of a tensor.

    Attributes:
        local: the elements; of a plain tensor, the tensor itself.
        box: where they lie in the whole; None on a rank that is not in the tensor's mesh.
        shape: the whole tensor's.
        spread: whether the tensor is a DTensor.
    """

    local: torch.Tensor
    box: Box | None
    shape: tuple[int, ...]
    spread: bool


def cut(
    shape: Sequence[int],
    splits: Sequence[Split | None],
    mesh: Sequence[int],
    coordinate: Sequence[int],
) -> Box:
    """The box of a tensor that one rank of a mesh holds.

    Args:
        shape: the whole tensor's.
        splits: for each dimension of the mesh, how it splits the tensor; None where it repeats it.
        mesh: its shape.
        coordinate: the rank's place in it.

    Raises:
        ValueError: the rank holds several boxes, with something between them.
    """
    offset, size = [0] * len(shape), list(shape)
    runs: dict[int, list[range]] = {}
    for split, parts, index in zip(splits, mesh, coordinate, strict=True):
        if split is not None:
            held = runs.get(split.dim, [range(shape[split.dim])])
            runs[split.dim] = _narrow(held, split.pieces, parts, index)
    for dim, held in runs.items():
        size[dim] = sum(map(len, held))
        if held:
            offset[dim] = held[0].start
            if held[-1].stop - held[0].start != size[dim]:
                raise ValueError(f"its part of dimension {dim} is not in one piece")
    return Box(tuple(offset), tuple(size))


def _narrow(runs: list[range], pieces: int, parts: int, index: int) -> list[range]:
    """What is left of runs of indices once each of `pieces` of them is split in `parts`."""
    found = []
    for piece in range(pieces):
        begin, end = _share(sum(map(len, runs)), pieces, piece)
        first, last = _share(end - begin, parts, index)
        at = 0
        for run in runs:
            inside = run[max(begin + first - at, 0) : max(begin + last - at, 0)]
            at += len(run)
            if inside:
                found.append(inside)
    return found


def _share(length: int, parts: int, index: int) -> tuple[int, int]:
    """Begin and end of one of `parts`, as `torch.chunk` cuts: the last ones may be empty."""
    most = -(-length // parts)
    return min(index * most, length), min((index + 1) * most, length)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is spread over a mesh. Does not import what nobody has imported yet."""
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(tensor, home.DTensor)


def any_dtensor(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of many tensors is spread over a mesh, at some 30 ns for each."""
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and home.DTensor in set(map(type, tensors))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank has of a tensor, itself and no copy."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def part_of(tensor: torch.Tensor, name: str) -> Part:
    """What this rank holds of a tensor; `name` is for errors.

    Raises:
        InputError: it is a DTensor of which a rank holds no plain box of values, or one of a job
            that eke has not joined.
    """
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return Part(tensor, Box((0,) * len(shape), shape), shape, spread=False)
    spread: Any = tensor
    mesh = spread.device_mesh
    here = world()
    if mesh.size() > here.size:
        raise InputError(
            f"the tensor {name} is spread over {mesh.size()} ranks, and eke knows of {here.size}",
            fix="Call eke.distributed.init() on every rank before anything is saved or restored",
        )
    splits = [_split(placement, name) for placement in spread.placements]
    local, coordinate = local_of(tensor), mesh.get_coordinate()
    if coordinate is None:
        return Part(local, None, shape, spread=True)
    try:
        box = cut(shape, splits, tuple(mesh.shape), coordinate)
    except ValueError as error:
        raise _refusal(name, f"is placed as {spread.placements}, and {error}") from error
    if tuple(local.shape) != box.shape:
        what = f"has a local part of shape {tuple(local.shape)} where {box.shape} belongs"
        raise _refusal(name, what)
    return Part(local, box, shape, spread=True)


def _split(placement: Any, name: str) -> Split | None:
    if placement.is_replicate():
        return None
    kind = type(placement).__name__
    if kind == "Shard":
        return Split(placement.dim)
    if kind == "_StridedShard":
        return Split(placement.dim, int(placement.split_factor))
    if placement.is_partial():
        raise _refusal(name, "is placed as Partial: its values are yet to be reduced over ranks")
    raise _refusal(name, f"is placed as {placement}")


def _refusal(name: str, what: str) -> InputError:
    return InputError(
        f"the tensor {name} {what}, which a checkpoint cannot hold",
        rule="every rank of a DTensor's mesh holds one box of it",
        fix="Call redistribute on it, with Shard or Replicate for each dimension of the mesh",
    )


def empty_beside(
    parameter: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device | None = None,
) -> torch.Tensor:
    """A new tensor for a parameter's state, not filled, placed as torch's optimizers place it.

    State of a DTensor's shape is spread as the DTensor is; of another shape, every rank of the mesh
    has all of it; a scalar is a plain tensor.
    """
    if not shape or not is_dtensor(parameter):
        return torch.empty(shape, dtype=dtype, device=device or parameter.device)
    from torch.distributed.tensor import DTensor, Replicate

    spread: Any = parameter
    alike = shape == tuple(parameter.shape)
    local = local_of(parameter)
    mesh, size = spread.device_mesh, tuple(local.shape) if alike else shape
    placements = spread.placements if alike else [Replicate()] * mesh.ndim
    made: torch.Tensor = DTensor.from_local(
        torch.empty(size, dtype=dtype, device=local.device),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return made


def mesh_of(tensors: Iterable[torch.Tensor], ranks: int) -> dict[str, int]:
    """Names and sizes of the arrangement of all the job's ranks that these tensors are spread over;
    of several, the one with the most dimensions."""
    best: dict[str, int] = {"data": ranks}
    most = 0
    seen: list[Any] = []
    for tensor in tensors:
        if not is_dtensor(tensor):
            continue
        spread: Any = tensor
        mesh = spread.device_mesh
        if any(mesh is one for one in seen):
            continue
        seen.append(mesh)
        if mesh.size() == ranks and mesh.ndim > most:
            most = mesh.ndim
            names = mesh.mesh_dim_names or [f"dim{n}" for n in range(mesh.ndim)]
            best = dict(zip(names, map(int, mesh.shape), strict=True))
    return best


def reshard(module: torch.nn.Module) -> None:
    """Let go of the whole parameters that FSDP2 keeps after a forward pass, so that the module has
    its DTensors. Backward gathers them again."""
    home = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(home, "FSDPModule", None)
    if kind is None:
        return
    for part in module.modules():
        if isinstance(part, kind):
            part.reshard()
