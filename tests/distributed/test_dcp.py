"""torch's own format, written tensor by tensor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from eke.distributed.dcp import save


def test_torch_reads_what_is_written_and_each_tensor_is_asked_for_once(tmp_path: Path) -> None:
    made = {"a/b.c": torch.arange(5.0), "0": torch.tensor(True), "none": torch.empty(0, 2)}
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return made[name]

    save({name: tensor.to("meta") for name, tensor in made.items()}, read, tmp_path)
    assert sorted(asked) == sorted(made)
    state = {name: torch.ones_like(tensor) for name, tensor in made.items()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(state[name], made[name]) for name in made)


@pytest.mark.parametrize("error", [KeyError("a"), OSError(5, os.strerror(5)), RuntimeError("x")])
def test_what_goes_wrong_comes_out_as_it_is(tmp_path: Path, error: Exception) -> None:
    def read(name: str) -> torch.Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        save({"a": torch.empty(3, device="meta")}, read, tmp_path)
    assert caught.value is error
