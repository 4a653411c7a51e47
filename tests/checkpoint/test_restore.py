import shutil

import pytest
import torch
from torch import nn

from eke.checkpoint import Checkpointer, CorruptCheckpoint, Keep
from eke.checkpoint.layout import step_name
from eke.checkpoint.manifest import MANIFEST
from eke.errors import EkeError, InputError


@pytest.fixture
def three(tmp_path, new_run):
    """Checkpoints of steps 1, 2 and 3, and the bits of each."""
    run = new_run()
    bits = {}
    with run.attach_to(Checkpointer(tmp_path / "ck", keep=Keep(last=9))) as ck:
        for step in (1, 2, 3):
            run.step()
            bits[step] = run.bits()
            ck.save(step).wait()
    return tmp_path / "ck", bits


def damage(root, step):
    file = root / step_name(step) / "rank00000.state.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def test_a_chosen_step(three, new_run):
    root, bits = three
    run = new_run(seed=9)
    with run.attach_to(Checkpointer(root)) as ck:
        assert ck.restore(2).step == 2
        assert run.bits() == bits[2]
        with pytest.raises(InputError, match=r"no checkpoint of step 7.*it holds 1, 2, 3"):
            ck.restore(7)


def test_falling_back_only_when_asked_to(three, new_run, caplog):
    root, bits = three
    damage(root, 3)
    (root / step_name(2) / MANIFEST).write_bytes(b"")
    run = new_run(seed=9)
    before = run.bits()
    ck = run.attach_to(Checkpointer(root))
    with pytest.raises(CorruptCheckpoint, match=r"rank00000\.state\.safetensors, tensor ") as e:
        ck.restore(check_first=True)
    assert run.bits() == before
    assert not e.value.partly_restored
    with pytest.raises(CorruptCheckpoint, match=r"partly restored.*Do not train on") as e:
        ck.restore()
    assert e.value.partly_restored
    assert run.bits() != before
    report = ck.restore(fallback=True)
    assert report.step == 1
    assert [step for step, _ in report.damaged] == [3, 2]
    assert "do not match its hash" in report.damaged[0][1]
    assert "digest" in report.damaged[1][1]
    assert "step 3 is damaged and is passed over" in caplog.text
    assert run.bits() == bits[1]
    ck.discard_after(1)
    run.step()
    ck.save(2).wait()
    assert ck.steps() == [1, 2]


def test_a_damaged_manifest_is_never_a_silent_step_back(three, new_run):
    root, _ = three
    manifest = root / step_name(3) / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"segment", b"segmenu", 1))
    with pytest.raises(CorruptCheckpoint, match="digest"):
        new_run().attach_to(Checkpointer(root)).restore()


def test_a_chosen_step_is_not_replaced_by_another(three, new_run):
    root, _ = three
    damage(root, 3)
    with pytest.raises(CorruptCheckpoint):
        new_run().attach_to(Checkpointer(root)).restore(3, fallback=True)


def test_no_sound_one_is_left(three, new_run):
    root, _ = three
    for step in (1, 2, 3):
        damage(root, step)
    with pytest.raises(EkeError, match="none of the 3 checkpoints"):
        new_run().attach_to(Checkpointer(root)).restore(fallback=True)


def test_directories_without_a_manifest_are_ignored(three, new_run):
    root, _ = three
    (root / step_name(8)).mkdir()
    shutil.copytree(root / step_name(3), root / ".tmp-step-000000009-a.b.1.2.c")
    assert new_run().attach_to(Checkpointer(root)).restore().step == 3


def test_only_a_part(three, new_run):
    root, bits = three
    run = new_run(seed=9)
    run.step()
    moments = {k: v for k, v in run.bits().items() if "/" in k}
    notes = dict(run.notes)
    with run.attach_to(Checkpointer(root)) as ck:
        report = ck.restore(1, only=("model",))
    assert report.unexpected == report.missing == ()
    after = run.bits()
    assert {k: v for k, v in after.items() if "/" in k} == moments
    assert {k: v for k, v in after.items() if "/" not in k} == {
        k: v for k, v in bits[1].items() if "/" not in k
    }
    assert run.notes == notes


def test_strict_names_every_difference_and_changes_nothing(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, extra={"gone": {"x": 1}})
        ck.save(1).wait()
    other = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3), "d": nn.Linear(2, 2).half()})
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=other, extra={"new": {"y": 2}})
        with pytest.raises(InputError) as caught:
            ck.restore()
        assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
        report = ck.restore(strict=False)
    assert report.missing == ("new", "model/d.bias", "model/d.weight")
    assert report.unexpected == ("gone", "model/c.bias", "model/c.weight")
    assert report.mismatched == ("model/b.bias", "model/b.weight")
    for text in ("missing: new, model/d.bias", "unexpected: gone", "mismatched: model/b.bias"):
        assert text in str(caught.value)
    assert torch.equal(other["a"].weight, model["a"].weight)
    assert torch.equal(other["b"].weight, before["b.weight"])


def test_a_dtype_is_cast_only_when_asked_to(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.tensor([3]))
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model)
        ck.save(1).wait()
    other = nn.Linear(2, 2).to(torch.bfloat16)
    other.register_buffer("seen", torch.tensor([0]))
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=other)
        with pytest.raises(InputError, match=r"mismatched: model/bias, model/weight"):
            ck.restore()
        report = ck.restore(cast=True)
        assert report.cast == ("model/bias", "model/weight")
        assert report.mismatched == report.resharded == ()
        assert torch.equal(other.weight, model.weight.bfloat16())
        assert other.seen.item() == 3
        other.seen = other.seen.to(torch.int32)
        with pytest.raises(InputError, match=r"mismatched: model/seen"):
            ck.restore(cast=True)


def test_a_provider_that_fails_half_way_says_so(tmp_path):
    class Refuses:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise KeyError("cursor")

    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, loader=Refuses())
        ck.save(1).wait()
        with pytest.raises(EkeError, match=r"restoring 'loader'.*cursor.*partly restored"):
            ck.restore()


def test_a_file_that_changes_between_the_check_and_the_load(three, new_run, faulty):
    """The second reading checks again."""
    root, _ = three
    run = new_run(seed=9)
    ck = run.attach_to(Checkpointer(root, storage=faulty))
    before = run.bits()
    original, file = faulty.open, root / step_name(3) / "rank00000.state.safetensors"
    opened = []

    def open_and_damage(path):
        opened.append(path.name)
        if opened.count(file.name) == 2:
            damage(root, 3)
        return original(path)

    faulty.open = open_and_damage
    with pytest.raises(CorruptCheckpoint, match="do not match its hash"):
        ck.restore(check_first=True)
    assert opened.count(file.name) == 2
    assert run.bits() != before


def test_each_byte_of_each_file_is_read_once(three, new_run, faulty):
    root, bits = three
    run = new_run(seed=9)
    ck = run.attach_to(Checkpointer(root, storage=faulty))
    names, taken = {}, {}
    opening, reading = faulty.open, faulty.read_into

    def opened(path):
        fd = opening(path)
        names[fd] = path.name
        return fd

    def read(fd, buffer, offset):
        count = reading(fd, buffer, offset)
        taken.setdefault(names[fd], []).append((offset, offset + count))
        return count

    faulty.open, faulty.read_into = opened, read
    assert ck.restore().step == 3
    assert run.bits() == bits[3]
    for file in (root / step_name(3)).iterdir():
        if file.name != MANIFEST:
            position = 0
            for begin, end in sorted(taken[file.name]):
                assert begin == position, file.name
                position = end
            assert position == file.stat().st_size


def test_a_step_fallen_back_to_overwrites_all_that_the_damaged_one_changed(tmp_path, new_run):
    """Optimizer state that came with the damaged step goes; what it had dropped comes back."""
    run = new_run()
    with run.attach_to(Checkpointer(tmp_path, keep=Keep(last=9))) as ck:
        ck.save(0).wait()
        without = run.bits()
        run.steps(2)
        ck.save(2).wait()
        damage(tmp_path, 2)
        other = new_run(seed=9)
        other.steps(3)
        live = {k: v for s in other.optimizer.state.values() for k, v in s.items()}
        again = other.attach_to(Checkpointer(tmp_path))
        with pytest.raises(CorruptCheckpoint):
            again.restore()
        assert {k: v for s in other.optimizer.state.values() for k, v in s.items()}.keys() == (
            live.keys()
        )
        assert again.restore(fallback=True).step == 0
    assert not other.optimizer.state
    assert other.bits() == without
    assert other.notes == run.notes | {"seen": 0, "history": []}


def test_a_step_that_lacks_what_the_damaged_one_changed_is_no_way_back(tmp_path):
    small, model = nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"a": nn.Linear(2, 2)})
    with Checkpointer(tmp_path, keep=Keep(last=9)) as ck:
        ck.attach(model=small)
        ck.save(1).wait()
    model["b"] = nn.Linear(2, 2)
    with Checkpointer(tmp_path, keep=Keep(last=9)) as ck:
        ck.attach(model=model)
        ck.save(2).wait()
        damage(tmp_path, 2)
        with pytest.raises(EkeError, match=r"does not have model/b\.bias.*partly restored"):
            ck.restore(fallback=True, strict=False)
        assert ck.restore(fallback=True, strict=False, check_first=True).step == 1


def test_two_ranks_fall_back_together(run_ranks, tmp_path):
    """One byte of one shard is wrong: both ranks hear of it, and both take the step before."""
    script = """
        import torch
        from eke.checkpoint import Checkpointer, CorruptCheckpoint, Keep
        from eke.distributed import init, shutdown, world

        init()
        torch.manual_seed(0)
        model = torch.nn.Linear(600, 600)
        with Checkpointer(sys.argv[1], keep=Keep(last=9)) as ck:
            ck.attach(model=model)
            ck.save(1).wait()
            first = model.weight.detach().clone()
            with torch.no_grad():
                model.weight += 1
            path = ck.save(2).wait().path
            if world().is_main:
                [file] = path.glob("rank00001.*.safetensors")
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)
            try:
                ck.restore()
            except CorruptCheckpoint as error:
                assert error.partly_restored
                assert error.problems[0].tensor == "model/weight", error
            else:
                raise SystemExit("not found")
            report = ck.restore(fallback=True)
            assert report.step == 1, report
            assert "model/weight" in report.resharded, report
            assert torch.equal(model.weight, first)
        shutdown()
    """
    for code, output in run_ranks(2, script, tmp_path / "ck"):
        assert code == 0, output
