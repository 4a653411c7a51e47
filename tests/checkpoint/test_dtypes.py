import json
import math
import struct
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.dtypes import STORED, stored_shape, tensor_bytes

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
OWN = {d: s.name for d, s in STORED.items() if s.parts == 1 and (s.name != "U8" or d == "uint8")}
"""What safetensors has by itself; the others are stored as something else."""


@given(st.sampled_from(sorted(STORED)), SHAPES)
def test_sizes_are_torchs_own(dtype, shape):
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    assert tensor_bytes(dtype, shape) == tensor.numel() * tensor.element_size()


@given(st.sampled_from(sorted(STORED)), SHAPES)
def test_the_shape_in_the_file_holds_the_same_bytes(dtype, shape):
    in_file = stored_shape(dtype, shape)
    assert math.prod(in_file) * STORED[dtype].itemsize == tensor_bytes(dtype, shape)
    parts = torch.view_as_real if getattr(torch, dtype).is_complex else lambda t: t
    assert in_file == tuple(parts(torch.empty(shape, dtype=getattr(torch, dtype))).shape)


def test_what_is_not_torchs_type_is_not_stored():
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in STORED)
    assert "qint8" not in STORED
    with pytest.raises(KeyError):
        tensor_bytes("qint8", (1,))


def in_a_file(dtype, shape, data):
    """A safetensors file with one entry, as its format says: length, JSON header, bytes."""
    entry = {
        "dtype": STORED[dtype].name,
        "shape": stored_shape(dtype, shape),
        "data_offsets": [0, len(data)],
    }
    header = json.dumps({"t": entry}).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_the_safetensors_library_reads_every_type(dtype, shape):
    """It checks the header against the length, so a wrong name, size or shape does not load."""
    data = bytes(i % 2 for i in range(tensor_bytes(dtype, shape)))
    loaded = safetensors.torch.load(in_a_file(dtype, shape, data))["t"]
    assert tuple(loaded.shape) == stored_shape(dtype, shape)
    assert loaded.reshape(-1).view(torch.uint8).numpy().tobytes() == data
    if dtype in OWN:
        assert loaded.dtype == getattr(torch, dtype)


def test_a_complex_number_is_its_real_and_its_imaginary_part():
    data = struct.pack("<4f", 1, -2, 3, 4)
    loaded = safetensors.torch.load(in_a_file("complex64", (2,), data))["t"]
    assert torch.view_as_complex(loaded).tolist() == [1 - 2j, 3 + 4j]


def test_it_needs_no_torch():
    script = "import sys, eke.checkpoint.dtypes; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
