import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.retention import Keep, expired
from eke.errors import InputError

STEPS = st.lists(st.integers(0, 200), max_size=40)
KEEPS = st.builds(Keep, last=st.integers(1, 5), every=st.none() | st.integers(1, 30))


@given(STEPS, KEEPS, st.sets(st.integers(0, 200), max_size=5))
def test_against_the_rule_in_words(steps, keep, protected):
    newest = sorted(set(steps), reverse=True)
    stays = {
        step
        for rank, step in enumerate(newest)
        if rank < keep.last or step in protected or (keep.every and step % keep.every == 0)
    }
    gone = expired(steps, keep, protected)
    assert gone == sorted(set(steps) - stays)
    assert not steps or max(steps) not in gone
    assert expired(stays, keep, protected) == []


def test_limit_of_one_keeps_the_newest():
    assert expired([1, 2, 3], Keep(last=1)) == [1, 2]
    assert expired([3], Keep(last=1)) == []


def test_every_as_text():
    assert Keep(every="1000 steps").every_steps == 1000
    assert Keep(every="1 step").every_steps == 1
    assert Keep(every="50").every_steps == 50


@pytest.mark.parametrize("bad", [{"last": 0}, {"last": True}, {"last": 2.0}, {"last": -1}])
def test_bad_last(bad):
    with pytest.raises(InputError, match="at least 1"):
        Keep(**bad)


@pytest.mark.parametrize("every", [0, -5, "soon", "10 minutes", 1.5, True, ""])
def test_bad_every(every):
    with pytest.raises(InputError, match="1000 steps"):
        Keep(every=every)
