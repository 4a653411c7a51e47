"""Ranks that fail, stop and die in the middle of a save: real processes, real signals."""

import signal

from eke.checkpoint import steps, verify

ONCE = """
    import os, time, torch
    from eke import distributed
    from eke.checkpoint import Checkpointer, Fit, Keep, SaveError, Segment, Storage
    from eke.errors import EkeError
    from eke.testing import assert_provider
    world = distributed.init(timeout_s=30.0)

    class Late(shared.FaultyStorage):
        late = False
        def create(self, path):
            if self.late:
                time.sleep(0.7)
            return super().create(path)

    storage = Late()
    ck = Checkpointer(sys.argv[1], storage=storage, keep=Keep(last=9))
    ck.attach(model=torch.nn.Linear(30, 30))
    ck.save(1).wait()

    # One rank's disk fails at once; the other is still writing when both save again.
    for failing in (1, 0):
        if world.rank == failing:
            storage.fail("write", at=1, code=28)
        else:
            storage.late = True
        begun = ck.save(2)
        begun.wait("captured") if world.rank != failing else None
        while world.rank == failing and not begun.final:
            time.sleep(0.01)
        storage.heal()
        heard = []
        for step in (3, 4, 5):
            try:
                ck.save(10 * (failing + 1) + step)
            except SaveError as error:
                text = str(error)
                heard.append((step, "step 2" in text, "No space left" in text))
        ck.wait()  # nothing is left to be heard
        storage.late = False
        print("heard", heard, begun.state, storage.calls.pop("write") > 1)
    print(ck.steps())

    # The ranks disagree about what is to be saved.
    other = torch.nn.Linear(3 + world.rank, 3)
    with Checkpointer(sys.argv[2]) as again:
        again.attach(model=other)
        try:
            again.save(1)
        except EkeError as error:
            print(str(error).splitlines()[0])

    class Own:
        def __init__(self, per_rank, value):
            self.per_rank, self.tensor = per_rank, torch.full((3,), float(value))
        def segments(self):
            return [Segment("x", self.tensor)]
        def state(self):
            return None
        def fit(self, saved):
            return Fit()
        def load(self, saved):
            saved.copy_into("x", self.tensor)

    assert_provider(Own(True, world.rank), fresh=lambda: Own(True, 9))
    assert_provider(Own(False, 5), fresh=lambda: Own(False, 9))
    try:
        assert_provider(Own(False, world.rank), fresh=lambda: Own(False, 9))
    except AssertionError as error:
        print(error)
    ck.close()
    distributed.shutdown()
"""


def test_one_ranks_failure_is_reported_once_on_every_rank(run_ranks, tmp_path):
    outputs = run_ranks(2, ONCE, tmp_path / "ck", tmp_path / "other")
    for rank, (code, text) in enumerate(outputs):
        assert code == 0, text
        assert text.splitlines()[:3] == [
            "heard [(3, True, True)] failed True",
            "heard [(3, True, True)] failed True",
            "[1, 14, 15, 24, 25]",
        ]
        assert "rank 1 holds other tensors than rank 0" in text.splitlines()[3]
        differs = f"rank {1 - rank} has another 'x' than rank {rank}: say True"
        assert differs in text.splitlines()[4], "what differs between ranks is per_rank"
    assert not (tmp_path / "other").exists()


LOST = """
    import os, pathlib, signal, time, torch
    from eke import distributed
    from eke.checkpoint import Checkpointer, Keep, SaveError, Storage
    world = distributed.init(timeout_s=60.0)
    root, lost, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]

    class Lost(Storage):
        armed = False
        def write(self, fd, data):
            if self.armed:
                os.kill(os.getpid(), getattr(signal, name))
            return super().write(fd, data)

    storage = Lost()
    pathlib.Path(f"{root}.{world.rank}").write_text(str(os.getpid()))
    ck = Checkpointer(root, storage=storage, patience=2.0)
    ck.attach(model=torch.nn.Linear(30, 30))
    ck.save(1).wait()
    storage.armed = world.rank == lost
    ticket, begun = ck.save(2), time.monotonic()
    try:
        ticket.wait()
    except SaveError as error:
        # patience, a nap between looks, and much for a busy machine
        print("failed", time.monotonic() - begun < 20, str(error).splitlines()[0], flush=True)
    if name == "SIGSTOP":
        os.kill(int(pathlib.Path(f"{root}.{lost}").read_text()), signal.SIGKILL)
    os._exit(0)
"""


def lose(run_ranks, root, lost, name):
    """What the rank that is left says of a save in whose middle the other was lost."""
    outputs = run_ranks(2, LOST, root, lost, name)
    assert outputs[lost][0] == -signal.SIGKILL
    code, text = outputs[1 - lost]
    assert code == 0, text
    assert text.startswith("failed True saving step 2 "), text
    assert steps(root) == [1]
    assert verify(root).ok
    return text


def test_a_rank_that_is_stopped_in_mid_save_is_named_within_bounds(run_ranks, tmp_path):
    text = lose(run_ranks, tmp_path / "ck", 1, "SIGSTOP")
    assert "rank 1 has shown no progress for 2 s" in text or "waiting for rank 1" in text


def test_the_first_rank_stopped_in_mid_save_is_named_within_bounds(run_ranks, tmp_path):
    text = lose(run_ranks, tmp_path / "ck", 0, "SIGSTOP")
    assert "for 2 s" in text
    assert "rank 0" in text


def test_the_first_rank_killed_in_mid_save_is_named_at_once(run_ranks, tmp_path):
    text = lose(run_ranks, tmp_path / "ck", 0, "SIGKILL")
    assert "rank 0 has ended" in text or "rank 0 does not answer" in text
