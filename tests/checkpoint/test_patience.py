from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.patience import Patience

NAPS = st.tuples(st.integers(1, 8), st.integers(-8, 20), st.booleans())


@given(st.integers(0, 40), st.lists(NAPS, max_size=20))
def test_of_a_sleep_what_was_asked_for_counts(most_s, naps):
    now = 0.0
    patience = Patience(most_s, lambda: now)
    counted = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds + late_s

    for asked_s, late_s, progress in naps:
        late_s = max(late_s, -asked_s)
        if progress:
            patience.moved()
            counted = 0.0
        patience.sleep(sleep, asked_s)
        counted += asked_s + min(0, late_s)
        assert patience.over == (counted > most_s)


def test_a_stop_through_which_several_slept_does_not_count_backwards():
    now = 0.0
    patience = Patience(3.0, lambda: now)

    def stop(_):
        nonlocal now
        now += 100

    def both(_):
        patience.sleep(stop, 1.0)

    patience.sleep(both, 1.0)
    for second in range(4):
        assert not patience.over, second
        patience.sleep(lambda _: None, 1.0)
        now += 1
    assert patience.over
