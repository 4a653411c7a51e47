import inspect

import pytest

from eke.checkpoint.task import Save
from eke.checkpoint.work import Task

CALLS = [name for name in vars(Task) if not name.startswith("_")]


@pytest.mark.parametrize("name", CALLS)
def test_a_save_is_what_the_engine_is_asked_to_do(name):
    asked, given = (inspect.signature(getattr(kind, name)) for kind in (Task, Save))
    assert asked == given


def test_there_is_something_to_compare():
    assert {"fill", "device", "same", "run", "release"} <= set(CALLS)
