import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.layout import temporaries, temporary_name
from eke.checkpoint.owner import (
    ABANDONED_AFTER_S,
    Home,
    Owner,
    me,
    new_token,
    parse_token,
    start_of,
    verdict,
)
from eke.errors import InputError

OWNERS = st.builds(
    Owner,
    st.sampled_from(["0a0b0c0d", "deadbeef"]),
    st.sampled_from(["00000001", "00000002"]),
    st.integers(1, 3),
    st.integers(0, 2),
)


@given(
    OWNERS,
    OWNERS,
    st.floats(0, 2 * ABANDONED_AFTER_S),
    st.dictionaries(st.integers(1, 3), st.integers(0, 2)),
)
def test_the_living_are_never_called_dead(owner, here, idle_s, processes):
    said = verdict(owner, here, idle_s, processes.get)
    if owner == here:
        assert said == "mine"
    elif owner.host != here.host:
        assert said == ("dead" if idle_s > ABANDONED_AFTER_S else "unknown")
    elif owner.boot == here.boot and processes.get(owner.pid) == owner.start:
        assert said == "alive"
    else:
        assert said == "dead"


def test_a_token_names_its_owner_from_the_directory_name(tmp_path):
    token = new_token(me())
    assert parse_token(token) == me()
    assert new_token(me()) != token
    (tmp_path / temporary_name("step", 1, token)).mkdir()
    assert parse_token(temporaries(tmp_path)[0].token) == me()


@pytest.mark.parametrize("token", ["", "a.b.c", "a.b.x.1.c", "a.b.1.x.c", "a.b.1.2.c.d"])
def test_strange_tokens(token):
    assert parse_token(token) is None
    assert verdict(None, me(), 0.0) == "unknown"
    assert verdict(None, me(), ABANDONED_AFTER_S + 1) == "dead"


def test_real_processes():
    assert start_of(os.getpid()) == me().start
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = me()._replace(pid=child.pid, start=start_of(child.pid))
    assert verdict(owner, me(), 0.0) == "alive"
    assert verdict(owner._replace(start=owner.start - 1), me(), 0.0) == "dead"  # the id was reused
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert verdict(owner, me(), 0.0) == "dead"  # a zombie writes nothing
    child.wait()
    assert verdict(owner, me(), 0.0) == "dead"


def test_a_forked_child_is_not_at_home():
    home = Home()
    home.require()
    pid = os.fork()
    if pid == 0:
        try:
            home.require()
        except InputError:
            os._exit(0 if not home.here else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
