"""The one file: `torch.load(weights_only=True)` reads it all back."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eke.checkpoint import export
from eke.checkpoint.export_torch import FILE, plain
from eke.errors import InputError


@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_loads_it_with_weights_only(llamas, tmp_path, ranks):
    out = export(llamas[ranks], tmp_path / "out", to="torch")
    state = torch.load(out / FILE, weights_only=True)
    assert state["step"] == 2
    expected = load_file(llamas[ranks] / "live.safetensors")
    del expected["logits"]
    tensors = state["tensors"]
    assert len(expected) > 60
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    tied = tensors["model/lm_head.weight"], tensors["model/model.embed_tokens.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    objects = state["objects"]
    assert len(objects["rng"]) == ranks
    assert objects["rng"][-1]["torch"].dtype == torch.uint8
    notes = objects["notes"]
    assert (notes["seen"], notes["ids"], notes[1, 2]) == ({1, 2}, {7}, float("inf"))
    assert (notes["size"], notes["bytes"], notes[5]) == (torch.Size([2, 3]), b"x", None)
    assert torch.equal(notes["n"], torch.tensor(3, dtype=torch.int16))
    assert torch.equal(notes["array"], torch.arange(4))


def test_values_in_types_that_weights_only_allows(tmp_path):
    value = [
        None, True, 2**70, -0.0, "text", b"bytes", (1, [2]), {1, (2, 3)}, torch.Size([1]),
        {("a", np.int64(2)): 1}, OrderedDict([("b", (1,)), ("a", 2)]), Counter("aab"), torch.int8,
        torch.device("cpu"), torch.ones(2), np.float32(0.1), np.ones((2, 0)), frozenset("x"),
    ]  # fmt: skip
    torch.save(plain(value), tmp_path / "file")
    back = torch.load(tmp_path / "file", weights_only=True)
    same = [*range(9), 10, 11, 12, 13]
    assert [back[i] for i in same] == [value[i] for i in same]
    assert [type(back[i]) for i in same] == [type(value[i]) for i in same]
    assert back[9] == {("a", 2): 1}
    assert back[14].tolist() == [1, 1]
    assert (back[15].dtype, back[15].item()) == (torch.float32, value[15].item())
    assert back[16].shape == (2, 0)
    assert back[17] == {"x"}


@pytest.mark.parametrize("key", [frozenset([1]), torch.tensor(1)])
def test_keys_that_it_does_not_allow(key):
    with pytest.raises(InputError, match="cannot build that"):
        plain({"a": {key: 1}})
    with pytest.raises(InputError, match="cannot build that"):
        plain([{(1, key)}])
