"""The states have the sizes and shapes that they are said to have."""

import pytest
import torch
from benchmarks.peers import ARMS
from benchmarks.states import W1_BYTES, WORKLOADS, build, gpt_shape

SCALE = 0.01


@pytest.mark.parametrize("mib", [24, 48, 200, 600, 1192, 4000])
def test_a_gpt_takes_about_the_bytes_that_were_asked_for(mib):
    layers, width, vocabulary = gpt_shape(mib << 20)
    parameters = width * (vocabulary + 1024 + 2) + layers * (12 * width**2 + 13 * width)
    assert 12 * parameters == pytest.approx(mib << 20, rel=0.15)


def test_at_full_size_it_is_gpt_2():
    assert gpt_shape(W1_BYTES)[:2] == (12, 768)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_state_changes_in_everything_that_is_not_frozen(workload):
    state = build(workload, SCALE)
    before = {name: tensor.clone() for name, tensor in state.named()}
    state.change()
    frozen = {
        f"model/{name}"
        for name, p in (state.model.named_parameters() if state.model else ())
        if not p.requires_grad
    }
    for name, tensor in state.named():
        constant = bool((before[name] == 0).all()) or tensor.ndim == 0
        assert torch.equal(tensor, before[name]) == (name in frozen or constant), name


def test_nine_tenths_of_w5_are_frozen():
    state = build("W5", SCALE * 4)
    changing = sum(t.nbytes for t in state.changing())
    assert 0.07 < changing / state.nbytes < 0.115


def test_w2_and_w4_count_what_they_say():
    assert len(list(build("W2", SCALE).named())) == 50 + 3
    assert len(list(build("W2+AdamW", SCALE).named())) == 4 * 53  # moments, and a step each
    assert len(build("W4", SCALE).objects) == 1000


@pytest.mark.parametrize("arm", ["eke", "eke, small pool", "floor", "safetensors", "torch.save"])
def test_an_arm_saves_what_the_state_is(arm, tmp_path):
    state = build("W1", SCALE / 2)
    saver = ARMS[arm](state, tmp_path)
    saver.save(tmp_path / "saved", 1)
    saver.hold()
    saver.finish()
    written = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert written >= state.nbytes
    if arm.startswith("eke"):
        saver.saver.close()
