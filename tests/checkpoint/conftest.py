"""What the checkpoint tests share: a small training run, a broken disk, and real ranks."""

import contextlib
import errno
import linecache
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh

from eke.checkpoint import Checkpointer, Keep, Storage, device

torch.set_num_threads(1)


class Net(nn.Module):
    """Tied weights, a frozen parameter, BatchNorm buffers, dropout: what is easy to get wrong."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 23, bias=False)
        self.head.weight = self.embed.weight
        self.inner.bias.requires_grad_(False)

    def forward(self, ids):
        return self.head(self.drop(self.norm(self.inner(self.embed(ids)))))


class Run:
    """A model in training; data, dropout and schedule all depend on saved state."""

    def __init__(self, seed=0, **adamw):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self.model = Net()
        self.optimizer = torch.optim.AdamW(
            (p for p in self.model.parameters() if p.requires_grad), lr=0.01, **adamw
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 2, 5], 0.5)
        self.notes = {"seen": 0, "history": []}

    def step(self):
        ids = torch.randint(0, 23, (6,))
        shift = random.random() + np.random.rand()  # noqa: NPY002
        loss = nn.functional.cross_entropy(self.model(ids), ids) + shift
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.notes["seen"] += 6
        self.notes["history"].append(loss.item())
        return loss.item()

    def steps(self, count):
        return [self.step() for _ in range(count)]

    def attach_to(self, checkpointer):
        checkpointer.attach(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            rng=True,
            extra={"notes": self.notes},
        )
        return checkpointer

    def bits(self):
        """Every tensor of model and optimizer, as bytes by name."""
        out = {k: v.detach().numpy().tobytes() for k, v in self.model.state_dict().items()}
        for index, (_, state) in enumerate(self.optimizer.state_dict()["state"].items()):
            out |= {f"{index}/{k}": v.numpy().tobytes() for k, v in state.items()}
        return out


class FaultyStorage(Storage):
    """A disk that fails: `fail(call, at, code)` makes the `at`-th call of a method raise."""

    def __init__(self):
        self.calls = {}
        self.faults = {}
        self.short = False

    def fail(self, call, at=1, code=errno.EIO):
        self.faults[call] = (at, code)

    def heal(self):
        self.faults = {}

    def _count(self, call, path=None):
        self.calls[call] = self.calls.get(call, 0) + 1
        at, code = self.faults.get(call, (0, 0))
        if at and self.calls[call] >= at:
            raise OSError(code, os.strerror(code), None if path is None else str(path))

    def make_root(self, path):
        self._count("make_root", path)
        super().make_root(path)

    def make_dir(self, path):
        self._count("make_dir", path)
        super().make_dir(path)

    def create(self, path):
        self._count("create", path)
        return super().create(path)

    def open(self, path):
        self._count("open", path)
        return super().open(path)

    def write(self, fd, data):
        self._count("write")
        return super().write(fd, data[: max(1, len(data) // 3)] if self.short else data)

    def read_into(self, fd, buffer, offset):
        self._count("read_into")
        count = max(1, len(buffer) // 3) if self.short else len(buffer)
        return super().read_into(fd, buffer[:count], offset)

    def sync(self, fd):
        self._count("sync")
        super().sync(fd)

    def sync_dir(self, path):
        self._count("sync_dir", path)
        super().sync_dir(path)

    def rename(self, source, target):
        self._count("rename", source)
        super().rename(source, target)

    def remove_tree(self, path):
        self._count("remove_tree", path)
        super().remove_tree(path)


@pytest.fixture
def new_run():
    """Make a fresh run; another seed means other weights."""
    return Run


@pytest.fixture
def faulty():
    return FaultyStorage()


@pytest.fixture
def saved(tmp_path):
    """A run, its committed checkpoint of step 3, and that checkpoint's directory."""
    run = Run()
    run.steps(3)
    with run.attach_to(Checkpointer(tmp_path / "ck", keep=Keep(last=9))) as checkpointer:
        path = checkpointer.save(3).wait().path
    return run, path


def start_ranks(folder, size, script, *arguments):
    """Run a script on several gloo ranks; returns (exit code, stdout and, if it failed, stderr)."""
    file = folder / f"script{random.getrandbits(32):x}.py"
    prelude = f"""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("shared", {str(Path(__file__))!r})
        shared = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(shared)
    """
    file.write_text(textwrap.dedent(prelude) + textwrap.dedent(script))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(size):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(file), *map(str, arguments)]
        processes.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        output = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
    return [
        (process.returncode, out + (err if process.returncode > 0 else ""))
        for process, (out, err) in zip(processes, output, strict=True)
    ]


@pytest.fixture(scope="module")
def mesh_of_one():
    """A mesh of this process alone, on which DTensors and FSDP2 work as on many ranks."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def run_ranks(tmp_path):
    """`start_ranks` in the test's directory."""
    return partial(start_ranks, tmp_path)


def train_llama(folder):
    """Train a tiny Llama for two steps, on every rank there is, and save it in `folder`."""
    from safetensors.torch import save_file
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    from eke import distributed

    here = distributed.world()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=True, use_cache=False,
        dtype="bfloat16",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    whole = DistributedDataParallel(model) if here.size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    notes = {
        "seen": {1, 2}, "ids": frozenset([7]), (1, 2): float("inf"), "n": np.int16(3),
        "array": np.arange(4), "size": torch.Size([2, 3]), "bytes": b"x", 5: None,
    }  # fmt: skip
    with Checkpointer(folder / "checkpoints") as ck:
        ck.attach(model=model, optimizer=optimizer, rng=True, extra={"notes": notes})
        for step in range(2):
            ids = torch.arange(8).reshape(1, 8) + 10 * here.rank + step
            whole(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ck.save(2).wait()
    if here.is_main:
        config.save_pretrained(folder / "config")
        live = {"logits": model.eval()(torch.arange(12).reshape(1, 12)).logits}
        live |= {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                live[f"optimizer/{name}/{key}"] = value
        live = {name: tensor.detach().clone() for name, tensor in live.items()}
        save_file(live, folder / "live.safetensors")


@pytest.fixture(scope="session")
def llamas(tmp_path_factory):
    """For 1 and 2 ranks, a directory with a trained tiny Llama: `checkpoints`, its `config`, and
    `live.safetensors` with its logits for twelve tokens and all tensors as they were in memory."""
    one, two = tmp_path_factory.mktemp("llama1"), tmp_path_factory.mktemp("llama2")
    script = """
        import os
        from transformers import LlamaForCausalLM  # takes long: once, not in each rank
        from eke import distributed
        child = os.fork()
        rank = "0" if child else "1"
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        distributed.init()
        shared.train_llama(shared.Path(sys.argv[1]))
        distributed.shutdown()
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    ((code, output),) = start_ranks(two, 1, script, two)
    assert code == 0, output
    train_llama(one)
    return {1: one, 2: two}


class FakeDevice:
    """A device as asynchronous as may be: nothing runs until somebody waits or calls `advance`.

    It claims tensors in host memory. Its compute stream runs in order; its copies complete in any
    order, and read the live bytes only then. An event is done when all copies before it are.

    Args:
        claims: which tensors are its own.
        prefer: what runs first when both may: "compute", "copies" or "either".
    """

    type = "cpu"

    def __init__(self, claims, seed=0, prefer="either"):
        self._claims, self._random, self._prefer = claims, random.Random(seed), prefer
        self._lock = threading.RLock()
        self._compute, self._copies = [], []
        self._asked = self._ran = self._after = 0
        self.gate = threading.Event()
        self.gate.set()
        self.waited_in, self.pinned, self.fail_at, self.issued = [], [], None, 0
        self.no_events = False

    def claims(self, tensor):
        return self._claims(tensor)

    def begin(self, places):
        with self._lock:
            self._after = self._asked

    def pin(self, address, nbytes):
        self.pinned.append(nbytes)
        return self.pinned.clear

    def issuing(self, place):
        return contextlib.nullcontext()

    def copy(self, target, source):
        with self._lock:
            self.issued += 1
            failing = self.issued == self.fail_at
            self._copies.append(
                {"to": target, "from": source, "after": self._after, "failing": failing}
            )

    def event(self, place):
        if self.no_events:
            raise RuntimeError("no event can be made")
        with self._lock:
            return FakeEvent(self, list(self._copies))

    def settle(self, place):
        with self._lock:
            event = FakeEvent(self, list(self._copies))
        event.wait()

    def ask(self, change, *tensors):
        """Training asks for a change of tensors, which torch counts now and which happens later."""
        with self._lock:
            for tensor in tensors:
                torch.autograd.graph.increment_version(tensor)
            self._compute.append(change)
            self._asked += 1

    def hold(self, event):
        with self._lock:
            self._compute.append(event)
            self._asked += 1

    def advance(self):
        """Let one thing happen; whether anything could."""
        with self._lock:
            copies = [one for one in self._copies if one["after"] <= self._ran]
            head = self._compute[0] if self._compute else None
            compute = head is not None and (not isinstance(head, FakeEvent) or head.done())
            if not compute and not copies:
                return False
            first = {"compute": 1.0, "copies": 0.0, "either": 0.5}[self._prefer]
            if compute and (not copies or self._random.random() < first):
                self._compute.pop(0)
                self._ran += 1
                if not isinstance(head, FakeEvent):
                    head()
            else:
                one = self._random.choice(copies)
                self._copies = [left for left in self._copies if left is not one]
                if not one["failing"]:
                    one["to"].copy_(one["from"])
            return True

    def finish(self):
        """Let everything happen."""
        while self.advance():
            pass


class FakeEvent:
    def __init__(self, device, copies):
        self.device, self.copies = device, copies

    def done(self):
        with self.device._lock:
            return not any(one is left for one in self.copies for left in self.device._copies)

    def wait(self):
        self.device.waited_in.append(threading.current_thread())
        assert self.device.gate.wait(60)
        while not self.done():
            assert self.device.advance(), "a copy waits for ever"
        if any(one["failing"] for one in self.copies):
            raise RuntimeError("an illegal memory access was encountered")

    def hold(self):
        self.device.hold(self)


@pytest.fixture
def new_device(monkeypatch):
    """Make a fake device that claims some tensors (all that are numbers with a dimension)."""
    made = []

    def make(claims=lambda t: t.dim() > 0 and (t.is_floating_point() or t.is_complex()), **more):
        made.append(FakeDevice(claims, **more))
        monkeypatch.setattr(device, "_devices", [made[-1]])
        return made[-1]

    yield make
    for one in made:
        one.gate.set()


class Interrupt:
    """Within it, `KeyboardInterrupt` strikes this thread as it comes to its so-many-th line of some
    modules. Not at a `with`, where no real one can: a lock is entered and left in one step.

    Attributes:
        lines: how many lines it has come to; all of them if `at` is None.
    """

    def __init__(self, at, *modules):
        self.at, self.lines = at, 0
        self._files = {module.__file__ for module in modules}

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename not in self._files:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self.lines += 1
            if self.lines - 1 == self.at:
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(self._before)
        return kind is not None and issubclass(kind, KeyboardInterrupt)


@pytest.fixture
def interrupt():
    """Make an `Interrupt`, which it swallows."""
    return Interrupt
