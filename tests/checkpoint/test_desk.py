"""What the engine's threads share: patience that ends, and failures that are told once."""

from pathlib import Path
from types import SimpleNamespace

from eke.checkpoint.desk import Desk
from eke.checkpoint.errors import SaveError
from eke.checkpoint.flow import Flow
from eke.checkpoint.ticket import Ticket


def a_save(step=5):
    return SimpleNamespace(
        ticket=Ticket(step, Path("step")),
        flow=Flow([1]),
        doing="writing a file",
        failure=lambda error: SaveError(str(error)),
    )


def test_what_makes_no_progress_fails_and_is_told_once():
    desk, task = Desk(0.01), a_save()
    desk.tasks.append(task)
    with desk.turn:
        while not task.ticket.final:
            desk.pause(0.01)
        assert "no progress for 0.01 s; it is capturing, writing a file" in str(task.ticket.error)
        assert list(desk.errors) == [task.ticket]
        desk.fail(task, OSError("later"))
        assert "no progress" in str(task.ticket.error)
        desk.forget(task.ticket)
        assert not desk.errors


def test_what_was_heard_before_it_failed_is_not_kept():
    desk, task = Desk(10.0), a_save()
    with desk.turn:
        desk.forget(task.ticket)
        desk.fail(task, OSError("late"))
        assert not desk.errors
        assert task.ticket.state == "failed"
