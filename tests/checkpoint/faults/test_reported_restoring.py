"""Faults of other loaders that their users reported; see docs/checkpoint-faults.md."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from eke.checkpoint import Checkpointer, CorruptCheckpoint, Storage, load_tensors, verify

MIB = 1 << 20
FILE = "rank00000.state.safetensors"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


def test_accelerate_2875_shared_keys_are_missing_when_a_tied_model_is_loaded(tmp_path):
    model, other = Tied(), Tied()
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model)
        ck.save(1).wait()
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=other)
        report = ck.restore(strict=True)
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.head.weight)


def test_deepspeed_3938_loading_takes_the_state_again_in_memory(tmp_path, growth_bytes):
    state = nn.ParameterList(nn.Parameter(torch.ones(MIB)) for _ in range(16))  # 64 MiB
    with Checkpointer(tmp_path, pool="4MiB") as ck:
        ck.attach(extra={"state": state})
        ck.save(1).wait()
        with torch.no_grad():
            for tensor in state:
                tensor.zero_()
        grown = growth_bytes(ck.restore)
    assert all((tensor == 1).all() for tensor in state)
    assert grown < 0.2 * 64 * MIB


class Watching(Storage):
    """What of a checkpoint is mapped into memory while it is read."""

    def __init__(self):
        self.mapped, self.reads = [], 0

    def read_into(self, fd, buffer, offset):
        self.reads += 1
        maps = Path("/proc/self/maps").read_text().splitlines()
        self.mapped += [line for line in maps if ".safetensors" in line]
        return super().read_into(fd, buffer, offset)


class Shrinking(Storage):
    """Another machine cuts the file off while it is read."""

    def read_into(self, fd, buffer, offset):
        if Path(f"/proc/self/fd/{fd}").readlink().name == FILE:
            os.truncate(f"/proc/self/fd/{fd}", 4096)
        return super().read_into(fd, buffer, offset)


def test_vllm_24469_mapped_files_are_slow_or_end_the_process(tmp_path):
    """Mapped over a network file system: 28 MiB/s, and SIGBUS when the file was cut off."""
    model = nn.Linear(300, 300)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model)
        path = ck.save(1).wait().path
    storage = Watching()
    with Checkpointer(tmp_path, storage=storage) as ck:
        ck.attach(model=model)
        ck.restore()
    assert load_tensors(path, storage=storage)
    assert verify(path, storage=storage).ok
    assert storage.reads > 5
    assert storage.mapped == []
    with pytest.raises(CorruptCheckpoint, match=FILE.replace(".", r"\.")):
        load_tensors(path, storage=Shrinking())
