import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.plan import HEADER, boxes, cut


@given(st.integers(1, 40), st.lists(st.integers(0, 50), max_size=12), st.integers(1, 17))
def test_blocks_tile_the_file_and_parts_tile_everything(header, sizes, block_bytes):
    blocks = cut(header, sizes, block_bytes)
    position, seen = 0, {}
    for block in blocks:
        assert block.begin == position
        position = block.end
        inside = 0
        for part in block.parts:
            assert part.at == inside
            assert part.begin == seen.get(part.tensor, 0) < part.end
            seen[part.tensor] = part.end
            inside += part.end - part.begin
        assert inside == block.end - block.begin
    assert position == header + sum(sizes)
    assert all(block.end - block.begin == block_bytes for block in blocks[:-1])
    assert seen == {HEADER: header} | {i: size for i, size in enumerate(sizes) if size}
    order = [part.tensor for block in blocks for part in block.parts]
    assert order == sorted(order)


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 300), st.integers(0, 300))
def test_boxes_are_the_elements_in_order(shape, a, b):
    tensor = np.arange(int(np.prod(shape))).reshape(shape)
    begin, end = sorted((min(a, tensor.size), min(b, tensor.size)))
    found = list(boxes(tuple(shape), begin, end))
    joined = [x for box in found for x in np.asarray(tensor[box]).ravel().tolist()]
    assert joined == list(range(begin, end))
    assert len(found) <= max(1, 2 * len(shape))
