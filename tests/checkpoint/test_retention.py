import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.retention import Keep, expired
from eke.errors import InputError

STEPS = st.lists(st.integers(0, 200), max_size=40)
KEEPS = st.builds(Keep, last=st.integers(1, 5), every=st.none() | st.integers(1, 30))


SOME = st.sets(st.integers(0, 200), max_size=5)


@given(STEPS, KEEPS, SOME, SOME, st.booleans())
def test_against_the_rule_in_words(steps, keep, protected, chosen, few):
    steps = set(steps)
    damaged = chosen & steps if few else steps - chosen
    good = sorted(steps - damaged, reverse=True)
    stays = {
        step
        for step in steps
        if len(steps) <= keep.last
        or not good
        or step in good[: keep.last]
        or step > good[0]
        or step in protected
        or (keep.every and step % keep.every == 0)
    }
    asked = []

    def sound(step):
        asked.append(step)
        return step not in damaged

    gone = expired(steps, keep, protected, sound)
    assert gone == sorted(steps - stays)
    assert not good or good[0] not in gone
    assert good or not gone
    assert len(asked) <= keep.last + len(damaged)
    assert expired(stays, keep, protected, sound) == []


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
