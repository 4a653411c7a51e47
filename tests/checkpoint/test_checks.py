import itertools
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.checks import (
    ManifestError,
    check_box_cover,
    check_ranges,
    digest_value,
    file_name,
    flag,
    natural,
    naturals,
    record,
    strict_json,
    text,
    unicode,
)

BOX = st.tuples(
    st.tuples(st.integers(0, 3), st.integers(0, 3)), st.tuples(st.integers(0, 3), st.integers(0, 3))
)


@given(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.lists(BOX, min_size=1, max_size=4))
def test_cover_against_counting_every_element(shape, boxes):
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    inside = True
    for offset, size in boxes:
        inside &= all(o + s <= n for o, s, n in zip(offset, size, shape, strict=True))
        for place in itertools.product(
            *(range(o, o + s) for o, s in zip(offset, size, strict=True))
        ):
            if place in counts:
                counts[place] += 1
    exact = inside and all(count == 1 for count in counts.values())
    if exact:
        check_box_cover("t", shape, boxes)
    else:
        with pytest.raises(ManifestError):
            check_box_cover("t", shape, boxes)


@given(st.data())
def test_every_tiling_is_a_cover(data):
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)))
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    boxes = [
        (tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))
        for pairs in itertools.product(*(itertools.pairwise(cut) for cut in cuts))
    ]
    assert sum(prod(size) for _, size in boxes) == prod(shape)
    check_box_cover("t", shape, data.draw(st.permutations(boxes)))


def test_a_scalar_is_one_box():
    check_box_cover("t", (), [((), ())])
    with pytest.raises(ManifestError, match="add up"):
        check_box_cover("t", (), [((), ()), ((), ())])
    with pytest.raises(ManifestError, match="no shards"):
        check_box_cover("t", (), [])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=5))
def test_ranges_against_counting_bytes(spans):
    ranges = sorted(("t", begin, begin + length) for begin, length in spans)
    ranges.sort(key=lambda r: r[1:])
    used = [byte for _, begin, end in ranges for byte in range(begin, end)]
    if len(used) != len(set(used)):
        with pytest.raises(ManifestError, match="shares bytes"):
            check_ranges("f", ranges)
    elif all(end > begin for _, begin, end in ranges):
        check_ranges("f", ranges)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", "/etc/passwd", "..", ".", ".hidden", "", "a\\b", "a\0b", "x" * 256, 5, None,
     "ü.json", "a b", "-rf", "C:x"],
)  # fmt: skip
def test_names_that_leave_the_directory(name):
    with pytest.raises(ManifestError, match="plain file name"):
        file_name(name)


def test_plain_names():
    assert file_name("rank00000.state.safetensors") == "rank00000.state.safetensors"


@pytest.mark.parametrize("value", [-1, 2**62 + 1, 1.0, True, None, "1", []])
def test_not_a_natural(value):
    with pytest.raises(ManifestError):
        natural({"n": value}, "n")


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (naturals, [1, -1]),
        (naturals, "12"),
        (naturals, [0] * 65),
        (text, 5),
        (flag, 1),
        (digest_value, "A" * 32),
        (digest_value, "a" * 31),
        (digest_value, None),
    ],
)
def test_wrong_types(check, value):
    with pytest.raises(ManifestError):
        check({"k": value}, "k")


def test_record():
    with pytest.raises(ManifestError, match="the thing is not"):
        record([], "the thing")


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":2}',
        b"NaN",
        b"[Infinity]",
        b"[" * 100_000,
        b"\xff",
        b"{",
        b"",
        b"1" * 5000,
        b"1e999",
        b"[-1e400]",
    ],
)
def test_json_that_is_refused(data):
    with pytest.raises(ValueError):
        strict_json(data)


def test_a_name_with_half_a_character():
    assert unicode("ü\n\x1b😀") == "ü\n\x1b😀"
    with pytest.raises(ManifestError, match="not Unicode"):
        unicode("a\ud83d")
