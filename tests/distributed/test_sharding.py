import itertools
from math import prod

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from eke.distributed import World
from eke.distributed.sharding import (
    Box,
    Part,
    Split,
    any_dtensor,
    cut,
    empty_beside,
    is_dtensor,
    local_of,
    mesh_of,
    part_of,
    reshard,
)


@st.composite
def layouts(draw, most_pieces=1):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    split = st.none() | st.builds(
        Split, st.integers(0, len(shape) - 1), st.integers(1, most_pieces)
    )
    return shape, [draw(split) for _ in mesh], mesh


def torchs(tensor, splits, mesh, coordinate):
    """The part that torch's own placements choose."""
    for split, parts, index in zip(splits, mesh, coordinate, strict=True):
        if split is not None:
            place = Shard(split.dim)
            if split.pieces > 1:
                place = _StridedShard(split.dim, split_factor=split.pieces)
            pieces, _ = place._split_tensor(tensor, parts, with_padding=False, contiguous=False)
            tensor = pieces[index]
    return tensor


def view(tensor, box):
    for dim, (start, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def coordinates(mesh):
    return itertools.product(*map(range, mesh))


@given(layouts())
def test_a_box_is_what_torch_puts_there(layout):
    shape, splits, mesh = layout
    whole = torch.arange(prod(shape)).reshape(shape)
    for coordinate in coordinates(mesh):
        box = cut(shape, splits, mesh, coordinate)
        assert torch.equal(view(whole, box), torchs(whole, splits, mesh, coordinate))


@given(layouts())
def test_boxes_cover_a_tensor_once_for_each_repetition(layout):
    shape, splits, mesh = layout
    count = torch.zeros(shape, dtype=torch.int64)
    for coordinate in coordinates(mesh):
        count_box = view(count, cut(shape, splits, mesh, coordinate))
        count_box += 1
    repeated = prod(parts for split, parts in zip(splits, mesh, strict=True) if split is None)
    assert torch.all(count == repeated)


@given(layouts(most_pieces=4))
@example(((8, 3), [Split(0, 2), Split(0)], (2, 2)))  # FSDP over tensor parallelism
@example(((9,), [Split(0, 2)], (2,)))
def test_a_part_that_is_no_box_is_found(layout):
    shape, splits, mesh = layout
    assume(prod(shape))
    whole = torch.arange(prod(shape)).reshape(shape)
    for coordinate in coordinates(mesh):
        part = torchs(whole, splits, mesh, coordinate)
        gap = any(
            bool((part.select(d, i + 1) - part.select(d, i) != whole.stride(d)).any())
            for d in range(part.dim())
            for i in range(part.size(d) - 1)
        )
        if gap:
            with pytest.raises(ValueError, match="not in one piece"):
                cut(shape, splits, mesh, coordinate)
        elif part.numel():
            assert torch.equal(view(whole, cut(shape, splits, mesh, coordinate)), part)


def test_a_plain_tensor_is_held_whole():
    tensor = torch.zeros(2, 3)
    assert not is_dtensor(tensor)
    assert not any_dtensor([tensor])
    assert local_of(tensor) is tensor
    assert part_of(tensor, "t") == Part(tensor, Box((0, 0), (2, 3)), (2, 3), spread=False)
    assert part_of(torch.tensor(1.0), "t").box == Box((), ())
    beside = empty_beside(tensor, torch.float64, (4,))
    assert (beside.dtype, tuple(beside.shape), type(beside)) == (torch.float64, (4,), torch.Tensor)
    assert mesh_of([tensor], 3) == {"data": 3}
    reshard(torch.nn.Linear(2, 2))
    assert World().size == 1


RANKS = """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import (
        DTensor, Partial, Replicate, Shard, distribute_tensor,
    )
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from eke import distributed
    from eke.distributed import (
        any_dtensor, empty_beside, local_of, mesh_of, part_of, reshard,
    )
    from eke.errors import InputError

    line = init_device_mesh("cpu", (4,))
    try:
        part_of(distribute_tensor(torch.zeros(4), line, [Shard(0)]), "early")
    except InputError as error:
        assert "eke.distributed.init()" in str(error), error
    else:
        raise AssertionError("a job that eke has not joined")
    here = distributed.init()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "pieces"))

    def matches(tensor, whole):
        part = part_of(tensor, "t")
        assert any_dtensor([whole, tensor])
        assert part.spread and part.shape == tuple(whole.shape)
        assert part.local is not tensor
        assert part.local.untyped_storage().data_ptr() == local_of(tensor).data_ptr() or (
            not part.local.numel() or part.local.storage_offset())
        view = whole
        for dim, (start, size) in enumerate(zip(*part.box, strict=True)):
            view = view.narrow(dim, start, size)
        assert torch.equal(part.local, view), (part, view)
        return part

    whole = torch.arange(35.0).reshape(5, 7)
    places = [Shard(0), Shard(1), Replicate()]
    for place in places:
        matches(distribute_tensor(whole, line, [place]), whole)
        for other in places:
            matches(distribute_tensor(whole, grid, [place, other]), whole)
    few = matches(distribute_tensor(torch.arange(3.0), line, [Shard(0)]), torch.arange(3.0))
    assert few.local.numel() == (here.rank < 3)
    single = torch.tensor(2.5)
    assert matches(distribute_tensor(single, line, [Replicate()]), single).box == ((), ())

    # FSDP over tensor parallelism, its pieces interleaved, and parameters on a part of the mesh.
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10))
    weight, scale = plain[0].weight.detach().clone(), plain[1].weight.detach().clone()
    parallelize_module(plain, grid["pieces"], {"0": ColwiseParallel(output_layouts=Replicate())})
    model = fully_shard(plain, mesh=grid["copies"])
    matches(model[0].weight, weight)
    norm = matches(model[1].weight, scale)
    assert norm.box.shape == (5,)
    assert mesh_of([model[1].weight, model[0].weight], 4) == {"copies": 2, "pieces": 2}
    assert mesh_of([model[1].weight], 4) == {"data": 4}
    assert mesh_of([few.local, distribute_tensor(whole, line, [Shard(0)])], 4) == {"dim0": 4}

    with torch.no_grad():
        model(torch.ones(2, 6))
    assert not isinstance(model.get_parameter("0.weight").grad, DTensor)
    reshard(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())

    alike = empty_beside(model[0].weight, torch.bfloat16, (10, 6))
    assert alike.placements == model[0].weight.placements and alike.dtype == torch.bfloat16
    assert alike.shape == (10, 6) and alike.to_local().shape == model[0].weight.to_local().shape
    row = empty_beside(model[0].weight, torch.float32, (10, 1))
    assert all(place.is_replicate() for place in row.placements) and row.shape == (10, 1)
    assert type(empty_beside(model[0].weight, torch.float32, ())) is torch.Tensor

    outside = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"]
    half = DTensor.from_local(torch.ones(2), outside, [Replicate()], run_check=False)
    assert part_of(half, "half").box == ((0,), (2,))

    def refused(tensor, why):
        try:
            part_of(tensor, "model/w")
        except InputError as error:
            assert "model/w" in str(error) and why in str(error), error
        else:
            raise AssertionError(why)

    refused(DTensor.from_local(torch.ones(2), line, [Partial()], run_check=False), "Partial")
    from torch.distributed.tensor.placement_types import _StridedShard
    split = DTensor.from_local(torch.ones(2), grid["pieces"],
        [_StridedShard(0, split_factor=2)], run_check=False, shape=torch.Size((4,)), stride=(1,))
    refused(split, "not in one piece")
    wrong = DTensor.from_local(torch.ones(3), line, [Shard(0)], run_check=False,
        shape=torch.Size((4,)), stride=(1,))
    refused(wrong, "a local part of shape (3,) where (1,) belongs")
    distributed.shutdown()
"""


def test_live_dtensors_of_four_ranks(run_ranks):
    for ended in run_ranks(RANKS, size=4, limit_s=100.0):
        assert ended.code == 0, ended.err
