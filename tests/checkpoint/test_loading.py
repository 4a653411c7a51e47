import pytest
import torch

from eke.checkpoint import CorruptCheckpoint, load_tensors
from eke.errors import EkeError, InputError


def test_by_pattern_without_a_model(saved):
    run, path = saved
    tensors = load_tensors(path, only="model/*")
    assert tensors.keys() == {f"model/{name}" for name in run.model.state_dict()}
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensors[f"model/{name}"], tensor)
        assert tensors[f"model/{name}"].dtype == tensor.dtype
    some = load_tensors(path.parent, only=["*/exp_avg", "model/norm.weight"])
    assert "model/norm.weight" in some
    assert all(name.endswith(("exp_avg", "norm.weight")) for name in some)
    assert len(load_tensors(path)) > len(tensors) + len(some)


def test_a_pattern_without_a_match(saved):
    with pytest.raises(InputError, match=r"PROVIDER/NAME, for example 'model/embed\.weight'"):
        load_tensors(saved[1], only="embed*")


def test_damage_is_named_and_only_what_is_asked_for_is_read(saved):
    _, path = saved
    file = path / "rank00000.frozen.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint) as caught:
        load_tensors(path)
    assert caught.value.problems[0].tensor == "model/inner.bias"
    assert caught.value.problems[0].file == file.name
    assert "model/norm.weight" in load_tensors(path, only="model/norm.*")
    file.unlink()
    with pytest.raises(CorruptCheckpoint, match="the file is missing"):
        load_tensors(path)


def test_nothing_there_and_a_failing_disk(saved, tmp_path, faulty):
    with pytest.raises(InputError, match="no such directory"):
        load_tensors(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorruptCheckpoint, match=r"MANIFEST\.json: the file is missing"):
        load_tensors(tmp_path / "empty")
    faulty.fail("read_into", at=2)
    with pytest.raises(EkeError, match="disk is failing"):
        load_tensors(saved[1], storage=faulty)
