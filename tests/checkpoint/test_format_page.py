"""The reader printed in docs/checkpoint-format.md reads what eke writes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from eke.checkpoint.manifest import MANIFEST
from eke.checkpoint.objects import encode

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


@pytest.fixture
def page():
    """The names that the page's Python blocks define, after running them in order."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_printed_reader(page, saved):
    run, path = saved
    tensors = page["read_checkpoint"](path)
    for name, tensor in run.model.state_dict().items():
        assert np.array_equal(tensors[f"model/{name}"], tensor.numpy())
    file = path / "rank00000.state.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="is damaged in rank00000"):
        page["read_checkpoint"](path)
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a checkpoint"):
        page["read_checkpoint"](path)


def test_every_tag_is_in_the_page():
    value = [
        2**60, float("nan"), b"x", (1,), {1}, frozenset([1]), torch.Size([1]), {1: 2},
        torch.float32, torch.device("cpu"), np.int8(1), torch.tensor(1), np.ones(1), torch.ones(1),
    ]  # fmt: skip
    tags = {next(iter(tree)) for tree in encode(value, "p")[0]} | {"$odict", "$counter"}
    text = PAGE.read_text()
    assert len(tags) == 16
    assert all(f"`{tag}`" in text for tag in tags)
