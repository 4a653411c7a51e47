"""torch's own loader reads the export, with nothing of eke."""

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from eke.checkpoint import Checkpointer, export, load_tensors
from eke.checkpoint.export_dcp import from_meta
from eke.checkpoint.tensors import as_bytes

BLOCKED = """
import sys
sys.modules["eke"] = None  # from here on `import eke` is an ImportError
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from safetensors.torch import load_file
path, live = sys.argv[1:]
expected = {k: v for k, v in load_file(live).items() if k not in ("logits", "model/lm_head.weight")}
state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
assert len(expected) > 60
assert all(torch.equal(state[name], expected[name]) for name in expected)
try:
    import eke
except ImportError:
    print("the same without eke")
"""


def test_torch_loads_a_checkpoint_of_two_ranks_into_one_without_eke(llamas):
    path = llamas[2] / "checkpoints" / "step-000000002"
    assert {file.name.split(".")[0] for file in path.glob("*.safetensors")} == {
        "rank00000",
        "rank00001",
    }
    command = [sys.executable, "-c", BLOCKED, path, llamas[2] / "live.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "the same without eke\n"), done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_loads_the_export(llamas, tmp_path, ranks):
    out = export(llamas[ranks], tmp_path / "out", to="dcp")
    expected = load_file(llamas[ranks] / "live.safetensors")
    del expected["logits"]
    assert "model/lm_head.weight" in expected
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert len(expected) > 60
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_every_type_and_shape(tmp_path):
    model = torch.nn.Module()
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.uint16):
        for shape in ((), (0, 3), (2, 3)):
            values = torch.randint(0, 2, shape).to(dtype)
            model.register_buffer(f"{dtype}{shape}".replace(".", "-"), values)
    with Checkpointer(tmp_path / "ck") as ck:
        ck.attach(model=model)
        ck.save(1).wait()
    out = export(tmp_path / "ck", tmp_path / "out", to="dcp")
    expected = load_tensors(tmp_path / "ck")
    assert len(expected) == 15
    state = {name: torch.ones_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype
        assert as_bytes(state[name]) == as_bytes(tensor)


def test_a_tensor_without_memory():
    tensor = from_meta("bfloat16", (1 << 20, 1 << 20))
    assert (tensor.device.type, tensor.dtype) == ("meta", torch.bfloat16)
