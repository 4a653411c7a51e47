"""A save is committed by all ranks or by none, and every rank hears which."""

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from eke.checkpoint import Checkpointer, Keep, SaveError, Storage, load_tensors, task, verify
from eke.checkpoint.capture import Captured, Held
from eke.checkpoint.flow import Spot
from eke.checkpoint.manifest import check, serialise
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.owner import me, new_token
from eke.checkpoint.previous import Previous
from eke.checkpoint.source import storage_of
from eke.checkpoint.task import Place, Save, save_error
from eke.checkpoint.ticket import Ticket
from eke.checkpoint.write import lanes_of
from eke.distributed import World
from eke.errors import EkeError

BLOCK_BYTES = 1 << 14


class Memory:
    """The store between ranks that are threads of this process."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def put(self, key, value):
        with self.lock:
            self.values[key] = json.dumps(value)

    def get(self, key):
        with self.lock:
            return json.loads(self.values[key]) if key in self.values else None

    def drop(self, key):
        with self.lock:
            self.values.pop(key, None)


class Progress:
    """Whom a save tells how far it is; `gives_up` when it is about to commit."""

    def __init__(self, ticket, gives_up):
        self.ticket, self.gives_up = ticket, gives_up

    def moved(self):
        pass

    def persisted(self):
        self.ticket.reach("persisted")

    def decide(self):
        if self.gives_up:
            raise SaveError("it has taken too long")


def together(root, captured, storages, store, quitter=None):
    """Two ranks' saves of step 5; returns each one's ticket and bytes or error."""
    token = new_token(me())

    def run(rank):
        gives_up = rank == quitter
        here, storage = World(rank, 2), storages[rank]
        place = Place(storage, root, False, Keep(), here, store, 30.0, Previous(root, storage))
        lanes = lanes_of(captured[rank], here, BLOCK_BYTES)
        ticket = Ticket(5, root / "step-000000005")
        save = Save(place, ticket, captured[rank], lanes, token, frozenset())

        def blocks():
            for number, lane in enumerate(lanes):
                for block in range(len(lane.blocks)):
                    slot = np.empty(BLOCK_BYTES, np.uint8)
                    save.fill(Spot(number, block), slot)
                    yield Spot(number, block), slot.data

        ticket.reach("captured")
        try:
            return ticket, save.run(blocks(), Progress(ticket, gives_up))
        except (EkeError, OSError) as error:
            return ticket, save.failure(error)
        finally:
            save.tidy()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {"model/a": torch.randn(300, 70), "model/b": torch.randn(9)}


def captures(tensors):
    held = [Held(name, tensor, "state", "segment") for name, tensor in tensors.items()]
    return [Captured(held, [], {}, {}, {}) for _ in range(2)]


def test_two_ranks_commit_one_checkpoint(tmp_path, tensors):
    store, root = Memory(), tmp_path / "ck"
    root.mkdir()
    results = together(root, captures(tensors), [Storage(), Storage()], store)
    path = root / "step-000000005"
    size = sum(file.stat().st_size for file in path.iterdir())
    assert [found for _, found in results] == [size, size]
    assert [ticket.state for ticket, _ in results] == ["persisted", "persisted"]
    assert verify(path).ok
    read = load_tensors(path)
    assert sorted(read) == sorted(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert {f.name[:9] for f in path.glob("*.safetensors")} == {"rank00000", "rank00001"}
    assert store.values == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_one_ranks_disk_fails_and_both_hear_of_it(tmp_path, tensors, faulty, rank):
    faulty.fail("write", at=2, code=errno.ENOSPC)
    storages = [Storage(), Storage()]
    storages[rank] = faulty
    root, store = tmp_path / "ck", Memory()
    root.mkdir()
    results = together(root, captures(tensors), storages, store)
    for ticket, error in results:
        assert isinstance(error, SaveError)
        assert error.ticket is ticket
        assert "No space left on device" in str(error)
    assert f"failed on rank {rank}" in str(results[1 - rank][1])
    assert list(root.iterdir()) == []
    assert store.values == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_given_up_is_not_outrun_by_its_own_files(tmp_path, tensors, rank):
    root, store = tmp_path / "ck", Memory()
    root.mkdir()
    results = together(root, captures(tensors), [Storage(), Storage()], store, rank)
    assert all("it has taken too long" in str(error) for _, error in results)
    assert list(root.iterdir()) == []
    assert store.values == {}


def test_what_two_ranks_both_write_is_not_committed(tmp_path):
    own = [Held("rng/state", torch.ones(5), "state", "object")]
    root = tmp_path / "ck"
    root.mkdir()
    both = [Captured([], own, {}, {}, {}) for _ in range(2)]
    results = together(root, both, [Storage(), Storage()], Memory())
    assert all(isinstance(error, SaveError) for _, error in results)
    assert all("rng/state" in str(error) for _, error in results)
    assert list(root.iterdir()) == []


def test_retention_that_fails_does_not_fail_the_save(tmp_path, faulty, caplog):
    with Checkpointer(tmp_path, storage=faulty, keep=Keep(last=1)) as ck:
        ck.attach(model=nn.Linear(4, 4))
        ck.save(1).wait()
        faulty.fail("rename", at=faulty.calls["rename"] + 2)  # the one after the commit's
        assert ck.save(2).wait().state == "committed"
        ck.wait()
        assert ck.steps() == [1, 2]
        assert "could not delete an old checkpoint" in caplog.text
        faulty.heal()
        ck.save(3)
        ck.wait()
        assert ck.steps() == [3]


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (OSError(errno.ENOSPC, "full", "f"), "saving step 5 failed: f: full"),
        (EkeError("rank 1 has ended"), "rank 1 has ended"),
        (ValueError("odd"), "saving step 5 failed: ValueError: odd"),
    ],
)
def test_what_the_user_is_told(tmp_path, error, match):
    ticket = Ticket(5, tmp_path)
    told = save_error(ticket, error)
    assert match in str(told)
    assert told.ticket is ticket
    assert told.__cause__ is error
    assert told.rule


def test_later_manifests_are_like_the_first(tmp_path, new_run, monkeypatch):
    """The first is checked in full; those of the same tensors are put together from its text."""
    run, rows, checked = new_run(), [], []
    more = nn.Module()
    more.register_parameter("größer", nn.Parameter(torch.ones(2, 3)))
    monkeypatch.setattr(task, "check", lambda one: checked.append(one.step) or check(one))
    with run.attach_to(Checkpointer(tmp_path)) as ck:
        for number in range(4):
            run.step()
            if number == 3:
                ck.attach(extra={"more": more})  # then they are not the same
            path = ck.save(number).wait().path
            assert verify(path).ok
            manifest = open_manifest(path, Storage())
            text = (path / "MANIFEST.json").read_bytes()
            assert serialise(manifest) == text
            rows.append({k: replace_hashes(v) for k, v in manifest.tensors.items()})

    assert rows[0] == rows[1] == rows[2]
    assert rows[3].keys() - rows[2].keys() == {"more/größer"}
    assert checked == [0, 3]


def alone(root, names=("state", "frozen")):
    """A save of step 5 by one rank, with a file of several blocks for each group."""
    root.mkdir()
    held = [Held(f"model/{name}", torch.randn(300, 70), name, "segment") for name in names]
    captured, storage = Captured(held, [], {}, {}, {}), Storage()
    place = Place(storage, root, False, Keep(), World(0, 1), None, 30.0, Previous(root, storage))
    ticket = Ticket(5, root / "step-000000005")
    lanes = lanes_of(captured, World(0, 1), BLOCK_BYTES)
    ticket.reach("captured")
    return Save(place, ticket, captured, lanes, new_token(me()), frozenset()), held


def test_every_file_is_let_go_also_if_one_cannot_be_closed(tmp_path, monkeypatch):
    save, held = alone(tmp_path / "ck")
    closed = []

    def close(writer):
        closed.append(writer)
        whole(writer)
        raise OSError(errno.EIO, "gone")

    whole = task.LaneWriter.close
    monkeypatch.setattr(task.LaneWriter, "close", close)

    def blocks():
        for lane in range(len(held)):
            slot = np.empty(BLOCK_BYTES, np.uint8)
            save.fill(Spot(lane, 0), slot)
            yield Spot(lane, 0), slot.data
        raise EkeError("given up")

    with pytest.raises(OSError, match="gone"):
        save.run(blocks(), Progress(save.ticket, False))
    assert len(set(closed)) == len(held) == 2


def test_a_save_may_be_released_while_a_step_asks_what_it_needs(tmp_path):
    made, held = alone(tmp_path / "ck")

    class Released(Save):
        """The writer lets it go between any two looks at it."""

        @property
        def _last(self):
            found, self.found = self.found, None
            return found

        @_last.setter
        def _last(self, value):
            self.found = value

    storages = {storage_of(held[0].tensor)}
    wanted = made.wanted(storages)
    assert len(wanted) == 1
    made.__class__ = Released
    made.found = [lane.last_blocks() for lane in made._lanes]
    assert made.wanted(storages) == wanted


def replace_hashes(entry):
    return replace(entry, shards=tuple(replace(shard, xxh3_128="") for shard in entry.shards))
