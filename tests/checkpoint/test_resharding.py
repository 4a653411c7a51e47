"""Saves of one number of ranks and one placement restore into any other, bit for bit."""

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from eke.checkpoint import Checkpointer, SaveError, Segment, Storage, load_tensors, verify
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.providers import compare
from eke.errors import InputError

JOB = """
    import sys

    import torch
    from safetensors.torch import load_file, save_file
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from eke import distributed
    from eke.checkpoint import Checkpointer, OptimizerProvider
    from eke.errors import EkeError

    class Net(nn.Module):
        # Tied weights, one pair with a single row; sizes that no number of ranks divides; a frozen
        # parameter, bfloat16, a scalar, a buffer, dropout. Two optimizers share it, see Job.
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(23, 6)
            self.inner = nn.Linear(6, 7)
            self.low = nn.Linear(7, 6).bfloat16()
            self.gate = nn.Linear(6, 1)
            self.also = nn.Linear(6, 1, bias=False)
            self.also.weight = self.gate.weight
            self.wide = nn.Linear(6, 6, bias=False)
            self.drop = nn.Dropout(0.3)
            self.head = nn.Linear(6, 23, bias=False)
            self.head.weight = self.embed.weight
            self.wide.weight.requires_grad_(False)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, ids):
            x = self.inner(self.embed(ids)).relu()
            x = self.low(x.bfloat16()).float()
            self.seen += 1
            return self.head(self.drop(self.wide(x) * (self.gate(x) + self.also(x))))

    class Position:
        def __init__(self):
            self.next = 0

        def state_dict(self):
            return {"next": self.next}

        def load_state_dict(self, state):
            self.next = state["next"]

    class Job:
        # A training run whose model is placed in one of the ways that torch has.
        def __init__(self, placement, seed, size):
            torch.manual_seed(seed)
            self.model = model = Net()
            if placement == "replicated":
                self.model = distributed.wrap(model, torch.device("cpu"))
            elif placement != "plain":
                from torch.distributed.fsdp import fully_shard
                from torch.distributed.tensor.parallel import (
                    ColwiseParallel, RowwiseParallel, parallelize_module,
                )
                mesh = init_device_mesh("cpu", (size,))
                if placement == "copies":
                    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("all", "part"))
                if placement == "grid":
                    grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "model"))
                    parallelize_module(model, grid["model"], {"wide": ColwiseParallel(
                        output_layouts=torch.distributed.tensor.Replicate())})
                    mesh = grid["data"]
                for part in (model.low, model.inner, model):
                    fully_shard(part, mesh=mesh)
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            self.second = torch.optim.AdamW([trained.pop("gate.bias")], lr=0.02)
            self.optimizer = torch.optim.AdamW(trained.values(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 2, 5], 0.5)
            self.loader = Position()
            rank = distributed.world().rank  # ranks that share a model's layer share its batch
            self.batch = rank // (size // 2) if placement == "grid" else rank

        def attach_to(self, checkpointer):
            checkpointer.attach(model=self.model, optimizer=self.optimizer, rng=True,
                scheduler=self.scheduler, loader=self.loader,
                extra={"second": OptimizerProvider(self.second, self.model)})
            return checkpointer

        def steps(self, count):
            return [self.step() for _ in range(count)]

        def step(self):
            draw = torch.Generator().manual_seed(1000 * self.loader.next + self.batch)
            self.loader.next += 1
            ids = torch.randint(0, 23, (5,), generator=draw)
            loss = nn.functional.cross_entropy(self.model(ids), ids)
            self.optimizer.zero_grad()
            self.second.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.second.step()
            self.scheduler.step()
            return loss.item()

        def whole(self):
            # A gathered copy of every tensor, as this rank sees it.
            distributed.reshard(self.model)
            model = getattr(self.model, "module", self.model)
            names = {p: n for n, p in model.named_parameters()}
            found = {f"model/{n}": t for n, t in model.state_dict().items()}
            for name, optimizer in (("optimizer", self.optimizer), ("second", self.second)):
                for parameter, state in optimizer.state.items():
                    found |= {f"{name}/{names[parameter]}/{k}": t for k, t in state.items()}
            return {
                name: getattr(t, "full_tensor", lambda t=t: t)().detach().clone()
                for name, t in found.items()
            }

    def save(placement, root, size):
        job = Job(placement, 0, size)
        job.steps(2)
        with torch.no_grad():
            job.model(torch.arange(3))  # FSDP2 now keeps whole parameters
        with job.attach_to(Checkpointer(root)) as checkpointer:
            ticket = checkpointer.save(2)
            before = job.whole()
            after = job.steps(2)  # captured while training goes on
            ticket.wait()
        if distributed.world().is_main:
            save_file(before, f"{root}/gathered.safetensors")
        return after

    def restore(placement, root, size, fresh=True):
        job = Job(placement, 1, size)
        if not fresh:
            job.steps(1)
        with job.attach_to(Checkpointer(root)) as checkpointer:
            report = checkpointer.restore()
        found, wanted = job.whole(), load_file(f"{root}/gathered.safetensors")
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
            same = found[name].reshape(-1).view(torch.uint8) == tensor.reshape(-1).view(torch.uint8)
            assert bool(same.all()), name
        assert job.loader.next == 2 and job.scheduler.last_epoch == 2
        return job, report

    def disagree(root, size):
        # One rank has spread a tensor that another has whole.
        from torch.distributed.tensor import Shard, distribute_tensor

        spread = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (size,)), [Shard(0)])
        layer = nn.Linear(4, 1)
        layer.bias = nn.Parameter(torch.ones(4) if distributed.world().is_main else spread)
        with Checkpointer(f"{root}/disagree") as checkpointer:
            checkpointer.attach(model=layer)
            try:
                checkpointer.save(1)
            except EkeError as error:
                assert "rank 1 holds other tensors than rank 0" in str(error), error
            else:
                raise AssertionError("saved")

    def main(arguments):
        size = distributed.init().size
        for argument in arguments:
            what, placement, root = argument.split(":")
            if what == "save":
                save(placement, root, size)
            elif what == "resume":
                wanted = save(placement, root, size)
                for fresh in (True, False):
                    job, report = restore(placement, root, size, fresh)
                    assert report.left_alone == report.resharded == (), report
                    assert job.steps(2) == wanted
                disagree(root, size)
            else:
                job, report = restore(placement, root, size)
                assert report.missing == report.unexpected == report.mismatched == ()
                job.steps(1)
        distributed.shutdown()
"""


def run(run_ranks, size, *cases):
    script = JOB + "\n    main(sys.argv[1:])\n"
    for code, output in run_ranks(size, script, *(":".join(map(str, case)) for case in cases)):
        assert code == 0, output


def here(call, *arguments):
    """Run one of the job's functions in this process, alone."""
    names = {}
    exec(compile(textwrap.dedent(JOB), "job", "exec"), names)
    return names[call](*arguments)


DCP = """
import sys
sys.modules["eke"] = None  # an import of it would fail
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

for root in sys.argv[1:]:
    wanted = load_file(f"{root}/gathered.safetensors")
    for tied in ("model/head.weight", "model/also.weight"):
        wanted.pop(tied)  # it is there under its first name
    live = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    reader = HuggingFaceStorageReader(f"{root}/step-000000002")
    dcp.load(live, storage_reader=reader, no_dist=True)
    for name, tensor in wanted.items():
        assert torch.equal(live[name], tensor), name
    print(len(live))
"""


def load_without_eke(*roots):
    command = [sys.executable, "-c", DCP, *map(str, roots)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.split())) == [30] * len(roots)


@pytest.mark.timeout(300)
def test_two_ranks_resume_and_restore_into_one_and_three(run_ranks, tmp_path):
    placements = ["replicated", "sharded"]
    roots = {placement: tmp_path / placement for placement in placements}
    run(run_ranks, 2, *(("resume", placement, root) for placement, root in roots.items()))
    for placement, root in roots.items():
        path = root / "step-000000002"
        assert verify(path).ok
        wanted, found = load_file(root / "gathered.safetensors"), load_tensors(path)
        assert all(found[name].equal(tensor) for name, tensor in wanted.items())
        assert found["model/head.weight"] is found["model/embed.weight"]
        manifest = open_manifest(path, Storage())
        assert manifest.mesh == ({"data": 2} if placement == "replicated" else {"dim0": 2})
        offsets = [s.offset for s in manifest.tensors["model/embed.weight"].shards]
        assert offsets == ([(0, 0)] if placement == "replicated" else [(0, 0), (12, 0)])
        job, report = here("restore", "plain", root, 1)
        assert report.left_alone == ("rng (of 2 ranks)",)
        assert ("model/embed.weight" in report.resharded) == (placement == "sharded")
        job.steps(1)
    others = [(placements[1 - n], roots[one]) for n, one in enumerate(placements)]
    run(run_ranks, 3, ("restore", "sharded", roots["sharded"]), *(("restore", *o) for o in others))
    load_without_eke(*roots.values())


def sharded(mesh, seed=0):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer):
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_job_of_one_rank_has_dtensors_too(mesh_of_one, tmp_path):
    model, optimizer = sharded(mesh_of_one)
    other, its = sharded(mesh_of_one, seed=1)
    step(model, optimizer)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        wanted = [p.full_tensor().clone() for p in model.parameters()]
        path = ck.save(1).wait().path
        step(model, optimizer)
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    for live, optim in ((other, its), (plain, plain_optimizer)):
        with Checkpointer(tmp_path) as ck:
            ck.attach(model=live, optimizer=optim)
            ck.restore()
        for parameter, whole in zip(live.parameters(), wanted, strict=True):
            assert torch.equal(getattr(parameter, "full_tensor", lambda p=parameter: p)(), whole)
            assert type(optim.state[parameter]["exp_avg"]) is type(parameter.detach())
        step(live, optim)
    assert load_tensors(path)["optimizer/0.weight/step"] == 1


def test_a_dtensor_that_does_not_change_is_linked(mesh_of_one, tmp_path):
    model, _ = sharded(mesh_of_one)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        paths = []
        for number in (1, 2):
            step(model, optimizer)
            paths.append(ck.save(number).wait().path)
    files = {group: f"rank00000.{group}.safetensors" for group in ("frozen", "state")}
    same = {group: paths[0].joinpath(f).samefile(paths[1] / f) for group, f in files.items()}
    assert same == {"frozen": True, "state": False}


def test_a_forgotten_barrier_is_found_in_a_dtensor(mesh_of_one, tmp_path):
    model, _ = sharded(mesh_of_one)
    storage = Storage()
    held = threading.Event()
    create = storage.create
    storage.create = lambda path: (held.wait(60), create(path))[1]
    with Checkpointer(tmp_path, pool="2MiB", storage=storage) as ck:
        model.big = nn.Parameter(distribute_tensor(torch.zeros(1 << 20), mesh_of_one, [Shard(0)]))
        ck.attach(model=model)
        ticket = ck.save(1)
        with torch.no_grad():
            model.big.add_(1)
        held.set()
        with pytest.raises(SaveError, match="the tensor model/big was changed before"):
            ticket.wait()
        ticket = ck.save(2)
        ck.barrier([model.big])
        with torch.no_grad():
            model.big.add_(1)
        assert load_tensors(ticket.wait().path)["model/big"].unique().tolist() == [1]


class Owner:
    def __init__(self, tensor, state=None, per_rank=False):
        self.tensor, self.object, self.per_rank = tensor, state, per_rank

    def segments(self):
        return [Segment("w", self.tensor)]

    def state(self):
        return self.object

    def fit(self, saved):
        return compare(saved.tensors, {"w": self.tensor})

    def load(self, saved):
        saved.copy_into("w", self.tensor)


def test_what_cannot_be_saved_or_restored_is_named(mesh_of_one, tmp_path):
    spread = distribute_tensor(torch.ones(4), mesh_of_one, [Shard(0)])
    partial = DTensor.from_local(torch.ones(4), mesh_of_one, [Partial()])

    def save(root, **owner):
        with Checkpointer(tmp_path / root) as ck:
            ck.attach(extra={"p": Owner(**owner)})
            ck.save(1)

    with pytest.raises(InputError, match=r"p/w is placed as Partial.*redistribute"):
        save("a", tensor=partial)
    with pytest.raises(InputError, match="p/rank00000/w is spread over ranks"):
        save("b", tensor=spread, per_rank=True)
    with pytest.raises(InputError, match=r"p\['x'\] is a DTensor"):
        save("c", tensor=spread, state={"x": spread})
    save("d", tensor=spread)
    meta, lazy = nn.Linear(2, 2, device="meta").weight, nn.LazyLinear(2).weight
    far = distribute_tensor(torch.empty(4, device="meta"), mesh_of_one, [Shard(0)])
    cases = [(meta, "meta device"), (far, "to_empty"), (lazy, "never been initialised")]
    for live, why in (*cases, (partial, "Partial")):
        with Checkpointer(tmp_path / "d") as ck:
            ck.attach(extra={"p": Owner(live)})
            with pytest.raises(InputError, match=f"the tensor (p/)?w .*{why}"):
                ck.restore()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("saved", ["replicated", "sharded"])
def test_two_ranks_into_four(run_ranks, tmp_path, saved):
    root = tmp_path / saved
    run(run_ranks, 2, ("save", saved, root))
    kinds = ["replicated", "sharded", "copies", "grid"]
    run(run_ranks, 4, *(("restore", kind, root) for kind in kinds))
    run(run_ranks, 3, *(("restore", kind, root) for kind in kinds[:2]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("saved", ["replicated", "sharded", "copies", "grid"])
def test_four_ranks_into_two_and_one(run_ranks, tmp_path, saved):
    root = tmp_path / saved
    run(run_ranks, 4, ("resume", saved, root))
    assert verify(root).ok
    run(run_ranks, 2, ("restore", "replicated", root), ("restore", "sharded", root))
    here("restore", "plain", root, 1)
    load_without_eke(root)
