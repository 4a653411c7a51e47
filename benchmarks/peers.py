"""The arms: eke, its peers, and a floor, each driven as its documentation advises on a CPU.

An arm's `save` is what training waits for; `hold` is what an update that came at once would wait
for besides; `finish` returns when the arm says that the checkpoint is written. Making it durable
(fsync of files and directories) is the benchmark's, for those arms that do not do it themselves.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import shutil
import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims import KEPT, POOL_SHARE
from benchmarks.states import State

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)


class Arm(ABC):
    """One way to save.

    Attributes:
        durable: whether `finish` leaves nothing to be fsynced.
        needs: what to import before memory is measured: code is no part of a checkpoint.
    """

    durable = False
    needs: tuple[str, ...] = ()

    def __init__(self, state: State, root: Path) -> None:
        self.state, self.root = state, root

    @abstractmethod
    def save(self, path: Path, number: int) -> None:
        """Start to save; returns when training may go on computing."""

    def hold(self) -> None:  # noqa: B027 (a save that is done when it returns has nothing to do)
        """Wait until the state may change."""

    def update(self) -> AbstractContextManager[Any]:
        """What an update has to happen in."""
        return nullcontext()

    def finish(self) -> None:  # noqa: B027
        """Wait until it is written."""

    def delete(self, path: Path) -> None:
        """Delete what may go before the next save; nobody measures it."""
        if path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class Eke(Arm):
    """`Checkpointer.save`; durable by itself."""

    needs = ("eke.checkpoint.checkpointer",)

    durable = True
    pool: str | int = "512MiB"

    def __init__(self, state: State, root: Path) -> None:
        super().__init__(state, root)
        from eke import Checkpointer, Keep

        self.saver = Checkpointer(root / "eke", pool=self.pool, keep=Keep(last=1))
        extra = {"objects": state.objects} if state.objects else None
        self.saver.attach(model=state.model, optimizer=state.optimizer, rng=True, extra=extra)
        self.ticket: Any = None

    def save(self, path: Path, number: int) -> None:
        self.ticket = self.saver.save(number)

    def hold(self) -> None:
        self.saver.barrier()

    def finish(self) -> None:
        self.ticket.wait()

    def delete(self, path: Path) -> None:
        """It deletes older checkpoints itself, after a save; the newest stays, to be linked."""
        self.saver.wait()


class EkeSmallPool(Eke):
    """With a pool of an eighth of the state."""

    def __init__(self, state: State, root: Path) -> None:
        self.pool = int(state.nbytes * POOL_SHARE)
        super().__init__(state, root)


class TorchSave(Arm):
    """`torch.save` of the state's dict."""

    def save(self, path: Path, number: int) -> None:
        torch.save(self.state.state_dict(), path)


class TorchSaveFsync(Arm):
    """`torch.save`, made durable before training goes on."""

    durable = True

    def save(self, path: Path, number: int) -> None:
        with path.open("wb") as file:
            torch.save(self.state.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())


class Safetensors(Arm):
    """`save_file` of all tensors."""

    needs = ("safetensors.torch",)

    def save(self, path: Path, number: int) -> None:
        from safetensors.torch import save_file

        save_file(dict(self.state.named()), path)


class Pickle(Arm):
    """One pickled blob."""

    def save(self, path: Path, number: int) -> None:
        path.write_bytes(pickle.dumps(self.state.objects, protocol=5))


class DcpSave(Arm):
    """`dcp.save`, whose writer fsyncs its files."""

    needs = ("torch.distributed.checkpoint",)

    def save(self, path: Path, number: int) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, thread_count=2)
        dcp.save(self.state.state_dict(), storage_writer=writer, no_dist=True)


class DcpAsync(Arm):
    """`dcp.async_save` in a thread, staging into new memory each time: the default."""

    needs = ("torch.distributed.checkpoint",)

    def __init__(self, state: State, root: Path) -> None:
        super().__init__(state, root)
        import torch.distributed as dist

        if not dist.is_initialized():
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
            dist.init_process_group("gloo", store=self._store(), rank=0, world_size=1)
        self.stager = self._stager()
        self.future: Any = None

    def _store(self) -> Any:
        return torch.distributed.HashStore()

    def _stager(self) -> Any:
        return None

    def _kind(self) -> Any:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return AsyncCheckpointerType.THREAD

    def save(self, path: Path, number: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.future = dcp.async_save(
            self.state.state_dict(),
            storage_writer=dcp.FileSystemWriter(path),
            async_stager=self.stager,
            async_checkpointer_type=self._kind(),
        )

    def hold(self) -> None:
        if hasattr(self.future, "staging_completion"):
            self.future.staging_completion.result()

    def finish(self) -> None:
        getattr(self.future, "upload_completion", self.future).result()


class DcpAsyncKept(DcpAsync):
    """With a stager that is kept, so that staging memory is used again: its best on a CPU."""

    shared = False

    def _stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=self.shared,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        return DefaultStager(options)


class DcpAsyncProcess(DcpAsyncKept):
    """Written by a process of its own, out of shared memory that is kept."""

    shared = True

    def _store(self) -> Any:
        return torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)

    def _kind(self) -> Any:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return AsyncCheckpointerType.PROCESS


class TorchCheckpointing(Arm):
    """Meta's `torch_checkpointing`, with what its troubleshooting page says to set on a CPU.

    Its direct writes are off: with them, 0.1.1 ended with EINVAL when it closed a file on ext4.
    """

    needs = ("torch_checkpointing",)

    def __init__(self, state: State, root: Path) -> None:
        super().__init__(state, root)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        config = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(
                staging_config=staging,
                process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=120),
            ),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self.manager = config.build()
        self.future: Any = None

    def save(self, path: Path, number: int) -> None:
        self.future = self.manager.save(str(path), self.state.state_dict())

    def hold(self) -> None:
        with self.manager.lock():
            pass

    def update(self) -> AbstractContextManager[Any]:
        return self.manager.lock()

    def finish(self) -> None:
        self.future.result()


class TorchSnapshot(Arm):
    """`Snapshot.take`."""

    needs = ("torchsnapshot",)

    def _app(self) -> dict[str, Any]:
        from torchsnapshot import StateDict

        given = {"model": self.state.model, "optimizer": self.state.optimizer}
        found: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        if self.state.objects:
            found["objects"] = StateDict(**self.state.objects)
        return found

    def save(self, path: Path, number: int) -> None:
        from torchsnapshot import Snapshot

        Snapshot.take(str(path), self._app())


class TorchSnapshotAsync(TorchSnapshot):
    """`Snapshot.async_take`."""

    pending: Any = None

    def save(self, path: Path, number: int) -> None:
        from torchsnapshot import Snapshot

        self.pending = Snapshot.async_take(str(path), self._app())

    def finish(self) -> None:
        self.pending.wait()


class LightningAsync(Arm):
    """Lightning's `AsyncCheckpointIO`."""

    needs = ("pytorch_lightning.plugins.io",)

    def __init__(self, state: State, root: Path) -> None:
        super().__init__(state, root)
        from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self.io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, path: Path, number: int) -> None:
        self.io.save_checkpoint(self.state.state_dict(), path)

    def finish(self) -> None:
        # One worker, so this runs after the save; a failure is kept for the next call.
        self.io._executor.submit(lambda: None).result()
        if self.io._error is not None:
            raise self.io._error


class Accelerate(Arm):
    """accelerate's `save_state`."""

    needs = ("accelerate",)

    def __init__(self, state: State, root: Path) -> None:
        super().__init__(state, root)
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.accelerator.prepare(*(x for x in (state.model, state.optimizer) if x is not None))

    def save(self, path: Path, number: int) -> None:
        self.accelerator.save_state(str(path))


class Floor(Arm):
    """What the machine allows: a copy into memory that is used again, then direct writes."""

    durable = True
    BLOCK_BYTES = 8 << 20

    def __init__(self, state: State, root: Path) -> None:
        super().__init__(state, root)
        block = self.BLOCK_BYTES
        self.nbytes = -(-sum(t.nbytes for _, t in state.named()) // block) * block
        self.memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE)
        self.buffer = torch.frombuffer(self.memory, dtype=torch.uint8).fill_(0)
        self.thread: threading.Thread | None = None

    def save(self, path: Path, number: int) -> None:
        place = 0
        for _, tensor in self.state.named():
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            self.buffer[place : place + flat.numel()].copy_(flat)
            place += flat.numel()
        self.thread = threading.Thread(target=self._write, args=(path,))
        self.thread.start()

    def _write(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0))
        try:
            os.posix_fallocate(fd, 0, self.nbytes)
            view = memoryview(self.memory)
            for place in range(0, self.nbytes, self.BLOCK_BYTES):
                os.pwrite(fd, view[place : place + self.BLOCK_BYTES], place)
            os.fsync(fd)
        finally:
            os.close(fd)
        above = os.open(path.parent, os.O_RDONLY)
        os.fsync(above)
        os.close(above)

    def finish(self) -> None:
        assert self.thread is not None
        self.thread.join()


ARMS: dict[str, type[Arm]] = {
    "eke": Eke,
    "eke, small pool": EkeSmallPool,
    "floor": Floor,
    "torch.save": TorchSave,
    "torch.save, fsync": TorchSaveFsync,
    "safetensors": Safetensors,
    "pickle": Pickle,
    "dcp.save": DcpSave,
    "dcp.async_save, fresh": DcpAsync,
    KEPT: DcpAsyncKept,
    "dcp.async_save, process": DcpAsyncProcess,
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot": TorchSnapshot,
    "torchsnapshot, async": TorchSnapshotAsync,
    "lightning, async": LightningAsync,
    "accelerate": Accelerate,
}
