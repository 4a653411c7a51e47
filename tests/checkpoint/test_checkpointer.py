import errno
import gc
import signal

import numpy as np
import pytest
import torch
from torch import nn

import eke.checkpoint
from eke.checkpoint import Checkpointer, Keep, SaveError, collect, load_tensors, steps, verify
from eke.checkpoint.layout import step_name, temporaries
from eke.errors import EkeError, InputError


@pytest.mark.parametrize("adamw", [{"foreach": True}, {"foreach": False}])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, new_run, adamw):
    run = new_run(**adamw)
    run.steps(4)
    with run.attach_to(Checkpointer(tmp_path)) as ck:
        ticket = ck.save(4).wait()
    expected = run.steps(5)
    bits, notes = run.bits(), dict(run.notes)
    other = new_run(seed=123, **adamw)
    other.steps(2)
    with other.attach_to(Checkpointer(tmp_path)) as ck:
        report = ck.restore()
    assert (report.step, report.path) == (4, ticket.path)
    assert report.missing == report.unexpected == report.mismatched == report.left_alone == ()
    assert other.steps(5) == expected
    assert other.bits() == bits
    assert other.notes == notes
    assert other.model.head.weight is other.model.embed.weight


def test_the_ticket_and_its_bill(tmp_path, new_run):
    with new_run().attach_to(Checkpointer(tmp_path)) as ck:
        ticket = ck.save(0).wait()
    assert (ticket.step, ticket.state) == (0, "committed")
    assert ticket.path == tmp_path / "step-000000000"
    assert ticket.bytes_written == sum(f.stat().st_size for f in ticket.path.iterdir())
    assert (ticket.bill.who, ticket.bill.what, ticket.bill.step) == ("checkpoint", "checkpoint", 0)
    assert ticket.bill.seconds > 0
    assert ticket.bill.measured
    assert ticket.bill.flops == ticket.bill.tokens == 0


def test_nothing_to_restore(tmp_path, new_run):
    run = new_run()
    before = run.bits()
    assert run.attach_to(Checkpointer(tmp_path / "absent")).restore() is None
    assert run.bits() == before


def test_tied_weights_are_written_once_and_come_back_tied(saved):
    run, path = saved
    tensors = load_tensors(path)
    assert tensors["model/head.weight"] is tensors["model/embed.weight"]
    assert torch.equal(tensors["model/head.weight"], run.model.head.weight)
    weight = run.model.embed.weight.detach().numpy().tobytes()
    assert (path / "rank00000.state.safetensors").read_bytes().count(weight) == 1


def test_an_untied_model_takes_a_tied_checkpoint(saved, new_run):
    run, path = saved
    other = new_run(seed=5)
    other.model.head.weight = nn.Parameter(torch.zeros(23, 8))
    with Checkpointer(path.parent) as ck:
        ck.attach(model=other.model)
        ck.restore(only=["model"])
    assert torch.equal(other.model.head.weight, run.model.embed.weight)
    assert torch.equal(other.model.embed.weight, run.model.embed.weight)


def test_a_restore_fills_the_live_tensors(saved, new_run):
    run, path = saved
    other = new_run(seed=1)
    other.steps(1)
    pointers = {name: p.data_ptr() for name, p in other.model.named_parameters()}
    with other.attach_to(Checkpointer(path.parent)) as ck:
        ck.restore()
    assert {name: p.data_ptr() for name, p in other.model.named_parameters()} == pointers
    assert other.bits() == run.bits()


def test_retention_after_each_save(tmp_path, new_run):
    with new_run().attach_to(Checkpointer(tmp_path, keep=Keep(last=2, every=4))) as ck:
        ck.protect({3})
        for step in range(1, 8):
            ck.save(step)
        ck.wait()
        assert ck.steps() == [3, 4, 6, 7]
        ck.protect(())
        ck.save(8)
        ck.wait()
        assert ck.steps() == [4, 7, 8]
    assert sorted(p.name for p in tmp_path.iterdir()) == [step_name(s) for s in (4, 7, 8)]


def test_retention_counts_neither_debris_nor_damage(tmp_path, new_run):
    run = new_run()
    with run.attach_to(Checkpointer(tmp_path, keep=Keep(last=1))) as ck:
        ck.save(1).wait()
        (tmp_path / step_name(9)).mkdir()
        (tmp_path / ".tmp-step-000000008-x").mkdir()
        ck.save(2)
        ck.wait()
        assert ck.steps() == [2]
        assert (tmp_path / step_name(9)).exists(), "what is not a checkpoint is not ours to delete"


@pytest.mark.parametrize("by", ["save", "collect"])
def test_retention_never_deletes_the_last_sound_one(tmp_path, new_run, by):
    run = new_run()
    with run.attach_to(Checkpointer(tmp_path, keep=Keep(last=9))) as ck:
        paths = {step: ck.save(step).wait().path for step in range(1, 6)}
    for step in (4, 5):
        file = paths[step] / "rank00000.objects.json"
        file.write_bytes(file.read_bytes()[:-1])
    if by == "collect":
        collect(tmp_path, Keep(last=2))
        assert steps(tmp_path) == [2, 3, 4, 5]
        collect(tmp_path, Keep(last=1))
        assert steps(tmp_path) == [3, 4, 5]
        assert run.attach_to(Checkpointer(tmp_path)).restore(fallback=True).step == 3
    else:
        with run.attach_to(Checkpointer(tmp_path, keep=Keep(last=2))) as ck:
            ck.save(6)
            ck.wait()
            assert ck.steps() == [3, 6], "two sound ones"


def test_a_committed_step_is_never_overwritten(saved):
    run, path = saved
    before = {f.name: f.read_bytes() for f in path.iterdir()}
    run.step()
    with run.attach_to(Checkpointer(path.parent)) as ck:
        with pytest.raises(InputError, match=r"step 3 is committed already.*discard_after"):
            ck.save(3).wait()
        assert {f.name: f.read_bytes() for f in path.iterdir()} == before
        assert temporaries(path.parent) == []


def test_going_back_and_saving_the_same_steps_again(tmp_path, new_run):
    run = new_run()
    with run.attach_to(Checkpointer(tmp_path, keep=Keep(last=9))) as ck:
        for step in range(1, 6):
            run.step()
            ck.save(step).wait()
        ck.restore(2)
        assert ck.discard_after(2) == [3, 4, 5]
        assert ck.steps() == [1, 2]
        run.step()
        ck.save(3).wait()
        assert ck.discard_after(3) == []
    assert steps(tmp_path) == [1, 2, 3]


def test_a_damaged_directory_of_the_same_step_is_replaced(saved):
    run, path = saved
    (path / "MANIFEST.json").write_text("{}")
    with run.attach_to(Checkpointer(path.parent)) as ck:
        ck.save(3).wait()
        assert verify(path).ok
        assert ck.steps() == [3]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


FAULTS = [
    ("make_root", 1, errno.EROFS, "Make the file system writable"),
    ("make_dir", 1, errno.EACCES, "Give yourself the right"),
    ("create", 1, errno.ENOSPC, "Free space"),
    ("create", 3, errno.EDQUOT, "quota"),
    ("write", 1, errno.ENOSPC, "Free space"),
    ("write", 4, errno.ENOSPC, "Free space"),
    ("write", 6, errno.EIO, "disk is failing"),
    ("sync", 1, errno.EIO, "disk is failing"),
    ("sync", 4, errno.EIO, "disk is failing"),
    ("sync_dir", 1, errno.EIO, "disk is failing"),
    ("rename", 1, errno.EROFS, "Make the file system writable"),
    ("open", 1, errno.ENXIO, "See to the disk"),
]


@pytest.mark.parametrize(("call", "at", "code", "fix"), FAULTS)
def test_a_failing_disk_costs_only_the_save(tmp_path, new_run, faulty, call, at, code, fix):
    root = tmp_path / "ck"
    run = new_run()
    run.attach_to(Checkpointer(root)).save(1).wait()
    before, there = run.bits(), sorted(root.iterdir())
    run.step()
    ck = run.attach_to(Checkpointer(root, storage=faulty, pool="16KiB"))
    if call == "open":  # the one thing that a save opens for reading
        (root / step_name(2)).mkdir()
        there = sorted(root.iterdir())
    faulty.fail(call, at, code)
    with pytest.raises(SaveError) as caught:
        ck.save(2).wait()
    message = str(caught.value)
    assert "saving step 2 failed" in message
    assert fix in message
    assert "older checkpoints are untouched" in message
    assert caught.value.exit_code == 1
    assert caught.value.ticket.state == "failed"
    assert caught.value.ticket.bytes_written == 0
    assert sorted(root.iterdir()) == there, "its own attempt is gone"
    assert verify(root / step_name(1)).ok
    faulty.heal()
    assert ck.save(2).wait().state == "committed"
    assert verify(root / step_name(2)).ok
    run.step()
    ck.restore(1)
    assert run.bits() == before


def test_a_write_error_names_the_file(tmp_path, new_run, faulty):
    faulty.fail("write", 3, errno.ENOSPC)
    with pytest.raises(SaveError, match=r"rank00000\.[a-z]+\.safetensors: No space left"):
        new_run().attach_to(Checkpointer(tmp_path, storage=faulty)).save(1).wait()


def test_what_cannot_be_cleaned_is_cleaned_by_the_next_save(tmp_path, new_run, faulty):
    faulty.fail("write", 2, errno.ENOSPC)
    faulty.faults["remove_tree"] = (1, errno.EIO)
    ck = new_run().attach_to(Checkpointer(tmp_path, storage=faulty))
    with pytest.raises(SaveError):
        ck.save(1).wait()
    assert len(temporaries(tmp_path)) == 1
    faulty.heal()
    ck.save(1).wait()
    assert [p.name for p in tmp_path.iterdir()] == [step_name(1)]


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(tmp_path, new_run, faulty):
    ck = new_run().attach_to(Checkpointer(tmp_path, keep=Keep(last=1), storage=faulty))
    ck.save(1).wait()
    faulty.fail("rename", at=faulty.calls["rename"] + 2)
    assert ck.save(2).wait().state == "committed"
    ck.wait()
    assert ck.steps() == [1, 2]
    faulty.heal()
    ck.save(3)
    ck.wait()
    assert ck.steps() == [3]


@pytest.mark.parametrize("durability", ["fsync", "none"])
def test_durability(tmp_path, new_run, faulty, durability):
    ck = new_run().attach_to(Checkpointer(tmp_path, durability=durability, storage=faulty))
    path = ck.save(1).wait().path
    files = len(list(path.iterdir()))
    if durability == "fsync":
        assert faulty.calls["sync"] == files
        assert faulty.calls["sync_dir"] == 2
    else:
        assert "sync" not in faulty.calls
        assert "sync_dir" not in faulty.calls
    assert verify(path).ok


def test_the_order_of_a_commit(tmp_path, new_run, faulty):
    """Every file is durable before the manifest exists, and that before the rename."""
    events = []
    for name in ("create", "sync", "sync_dir", "rename"):
        method = getattr(faulty, name)

        def note(*arguments, name=name, method=method):
            events.append((name, getattr(arguments[-1], "name", "")))
            return method(*arguments)

        setattr(faulty, name, note)
    new_run().attach_to(Checkpointer(tmp_path, storage=faulty)).save(1).wait()
    created = [what for name, what in events if name == "create"]
    assert created[-1] == "MANIFEST.json"
    assert [name for name, _ in events] == [
        *["create", "sync"] * len(created),
        "sync_dir",
        "rename",
        "sync_dir",
    ]
    assert events[-2][1] == step_name(1)
    assert events[-1][1] == tmp_path.name


def test_an_object_that_cannot_be_saved_leaves_nothing(tmp_path):
    ck = Checkpointer(tmp_path / "ck")
    ck.attach(extra={"bad": {"f": print}})
    with pytest.raises(InputError, match=r"bad\['f'\]"):
        ck.save(1).wait()
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize("step", [-1, 1.0, True, "3", None, 2**53])
def test_wrong_steps(tmp_path, new_run, step):
    with pytest.raises(InputError, match="a whole number from 0"):
        new_run().attach_to(Checkpointer(tmp_path)).save(step).wait()


def test_misuse(tmp_path, new_run):
    with pytest.raises(InputError, match="nothing is attached"):
        Checkpointer(tmp_path).save(1).wait()
    with pytest.raises(InputError, match='"fsync" or "none"'):
        Checkpointer(tmp_path, durability="maybe")
    with pytest.raises(InputError, match=r"it is a Keep.*"):
        Checkpointer(tmp_path, keep=3)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="root is not a directory"):
        Checkpointer(tmp_path / "file")
    run = new_run()
    ck = run.attach_to(Checkpointer(tmp_path))
    for step in (1.0, "1", True, -1):
        for call in (ck.restore, ck.discard_after):
            with pytest.raises(InputError, match="a whole number from 0"):
                call(step)
    with pytest.raises(InputError, match="'model' is attached already"):
        ck.attach(model=run.model)
    for name in ("model", "rng", "a/b", "", ".x", "ü", 3):
        with pytest.raises(InputError, match="name is unusable"):
            ck.attach(extra={name: {}})
    with pytest.raises(InputError, match="'other' is not attached"):
        ck.restore(only=["other"])
    ck.close()
    ck.close()
    late = {
        "save": lambda: ck.save(1),
        "restore": ck.restore,
        "attach": lambda: ck.attach(extra={"late": {}}),
        "barrier": ck.barrier,
        "protect": lambda: ck.protect([1]),
        "discard_after": lambda: ck.discard_after(1),
        "wait": ck.wait,
        "with": ck.__enter__,
    }
    for name, call in late.items():
        with pytest.raises(InputError, match="this checkpointer is closed"):
            pytest.fail(f"{name} returned {call()}")


def test_an_optimizer_attached_before_its_model_and_numpys_steps_and_one_name(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path) as ck:
        ck.attach(optimizer=optimizer)
        ck.attach(model=model)
        path = ck.save(np.int64(7)).wait().path
        assert "optimizer/weight/exp_avg" in load_tensors(path)
        assert ck.restore(np.int64(7), only="model").step == 7


def test_several_attach_calls_and_a_second_optimizer(tmp_path):
    model = nn.Linear(2, 2)
    first = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([model.bias])
    ck = Checkpointer(tmp_path)
    ck.attach(model=model)
    ck.attach(optimizer=first)
    ck.attach(extra={"second": second})
    model(torch.ones(1, 2)).sum().backward()
    first.step()
    second.step()
    path = ck.save(1).wait().path
    assert {"optimizer/weight/momentum_buffer", "second/bias/exp_avg"} <= load_tensors(path).keys()


def test_saving_holds_on_to_nothing(tmp_path, new_run):
    import weakref

    run = new_run()
    ck = run.attach_to(Checkpointer(tmp_path))
    ck.save(1).wait()
    ck.restore()
    ghost = weakref.ref(run.model)
    ck.close()
    del run, ck
    gc.collect()
    assert ghost() is None


def test_the_package_exports_what_it_says():
    for name in eke.checkpoint.__all__:
        assert getattr(eke.checkpoint, name) is not None
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = eke.checkpoint.nothing_such


RANKS = """
    import torch
    from eke import distributed
    from eke.checkpoint import Checkpointer, Keep
    from eke.errors import EkeError
    world = distributed.init()
    root = sys.argv[1]

    class Loader:
        def __init__(self, place): self.place = place
        def state_dict(self):
            order = torch.arange(4)
            return {"place": self.place, "order": order, "again": order}
        def load_state_dict(self, state):
            assert state["again"] is state["order"]
            self.place = state["place"]

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(300, 900), torch.nn.Linear(900, 2))
        model = distributed.wrap(model, torch.device("cpu"))
        return model, torch.optim.AdamW(model.parameters())

    def train(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 300)).square().mean().backward()
            optimizer.step()
        return [p.detach().double().sum().item() for p in model.parameters()]

    model, optimizer = make(0)
    torch.manual_seed(100 + world.rank)
    train(model, optimizer)
    loader, own = Loader(5), Loader(world.rank)
    faulty = shared.FaultyStorage()
    ck = Checkpointer(root, keep=Keep(last=9), storage=faulty)
    ck.attach(model=model, optimizer=optimizer, loader=loader, rng=True, extra={"own": own})
    ticket = ck.save(2).wait()
    print("saved", ticket.state, ticket.path.name, ticket.bytes_written)
    after = train(model, optimizer)

    for call, rank in (("write", 1), ("create", 0), ("rename", 0), ("sync", 1)):
        if world.rank == rank:
            faulty.fail(call, at=1, code=28)
        try:
            ck.save(3).wait()
        except EkeError as error:
            print("failed", type(error).__name__, "No space left" in str(error), error.ticket.state)
        faulty.heal()
        faulty.calls.clear()
    if world.rank == 1:
        own.place = print
    try:
        ck.save(3).wait()
    except EkeError as error:
        print("refused", type(error).__name__, "own['place']" in str(error))
    own.place = world.rank
    if world.rank == 1:
        model.module.register_buffer("odd", torch.ones(1))
    try:
        ck.save(3).wait()
    except EkeError as error:
        print("differs", "rank 1 holds other tensors than rank 0" in str(error))
    if world.rank == 1:
        del model.module.odd

    other, its_optimizer = make(7)
    loader2, own2 = Loader(0), Loader(-1)
    with Checkpointer(root) as again:
        again.attach(model=other, optimizer=its_optimizer, loader=loader2, rng=True)
        again.attach(extra={"own": own2})
        report = again.restore()
        print("restored", report.step, report.left_alone, loader2.place, own2.place == world.rank)
        print("same", train(other, its_optimizer) == after)
        print(again.discard_after(0), again.steps())
    print("files", len(list(ck.root.iterdir())))
    ck.save(5).wait()
    sys.stdout.flush()
    import os, signal
    if world.rank == 1:
        faulty.write = lambda fd, data: os.kill(os.getpid(), signal.SIGKILL)
    try:
        ck.save(6).wait()
    except EkeError as error:
        print("alone", "rank 1 has ended" in str(error), [p.name for p in ck.root.iterdir()])
    sys.stdout.flush()
    os._exit(0)  # there is nobody left to leave the group with
"""


def test_two_real_ranks(run_ranks, tmp_path):
    root = tmp_path / "ck"
    outputs = run_ranks(2, RANKS, root)
    assert [code for code, _ in outputs] == [0, -signal.SIGKILL], outputs
    for rank, (_, output) in enumerate(outputs):
        lines = output.splitlines()
        if rank == 0:
            assert lines.pop() == "alone True ['step-000000005']"
        assert lines[0].startswith("saved committed step-000000002 ")
        assert lines[1:5] == ["failed SaveError True failed"] * 4
        assert lines[5:] == [
            "refused InputError True",
            "differs True",
            "restored 2 () 5 True",
            "same True",
            "[2] []",
            "files 0",
        ]
    path = root / step_name(5)
    assert verify(path).ok
    assert {f.name for f in path.iterdir()} == {
        "MANIFEST.json",
        "rank00000.objects.json",
        "rank00000.objects.safetensors",
        "rank00000.state.safetensors",
        "rank00001.objects.json",
        "rank00001.objects.safetensors",
        "rank00001.state.safetensors",
    }
    sizes = [f.stat().st_size for f in path.glob("*.state.safetensors")]
    assert max(sizes) < 1.1 * min(sizes), "the ranks share the bytes"
    _restore_on_one_rank(path)


def _restore_on_one_rank(path):
    """A checkpoint of two ranks, restored by one."""
    facts = eke.checkpoint.inspect(path)
    assert facts["world_size"] == 2
    providers = facts["providers"]
    assert {name for name, p in providers.items() if p["per_rank"]} == {"rng", "own"}
    shards = [t["shards"] for p in providers.values() for t in p["tensors"].values()]
    assert max(map(len, shards)) == 2, "one tensor lies in both files"
    assert "rank00001/order" in providers["own"]["tensors"]
    assert "order" in providers["loader"]["tensors"]
    assert providers["own"]["tensors"]["rank00001/again"]["alias_of"] == "own/rank00001/order"
    tensors = load_tensors(path, "model/*")

    class Loader:
        place = None

        def state_dict(self):
            return {"place": self.place}

        def load_state_dict(self, state):
            self.place = state["place"]
            self.order = state["order"]

    model = nn.Sequential(nn.Linear(300, 900), nn.Linear(900, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    loader, own = Loader(), Loader()
    with Checkpointer(path.parent) as ck:
        ck.attach(model=model, optimizer=optimizer, loader=loader, rng=True, extra={"own": own})
        random_state = torch.get_rng_state()
        with pytest.raises(EkeError, match=r"mismatched: own \(of 2 ranks\)"):
            ck.restore()
        report = ck.restore(strict=False)
    assert report.left_alone == ("rng (of 2 ranks)",)
    assert report.mismatched == ("own (of 2 ranks)",)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (loader.place, own.place) == (5, None)
    assert loader.order.tolist() == [0, 1, 2, 3]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[f"model/{name}"])
    assert optimizer.state[model[0].weight]["step"].item() > 0
