"""What `encode` makes is accepted; what is not of that form is refused, in time."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.checks import ManifestError
from eke.checkpoint.objects import MAX_DEPTH, decode, encode
from eke.checkpoint.tags import check_tree


def test_everything_that_is_encoded_is_accepted():
    value = [
        None, True, 1, -(2**70), 2**70, 0.5, float("nan"), "$int", b"", b"a", b"ab", b"abc", (1,),
        {1}, frozenset([2]), torch.Size([3]), {1: 2, None: 3}, {"$int": 1}, OrderedDict(a=1),
        Counter("aab"), torch.bfloat16, torch.float8_e4m3fn, torch.device("cpu"),
        torch.device("cuda:1"), np.float64(1), np.bool_(True), torch.tensor(1), np.ones(2),
        torch.ones(2), {"": {"a/b": [[]]}},
    ]  # fmt: skip
    check_tree(encode(value, "p")[0])
    check_tree(encode({"name\nwith\x1b": torch.ones(1)}, "p")[0])


def nested(depth, wrap):
    tree = 1
    for _ in range(depth):
        tree = wrap(tree)
    return tree


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x],
        lambda x: {"a": x},
        lambda x: {"$tuple": [x]},
        lambda x: {"$dict": [["a", x]]},
    ],
)
def test_nesting_has_one_limit_for_all(wrap):
    check_tree(nested(MAX_DEPTH, wrap))
    decode(nested(MAX_DEPTH, wrap), {}.__getitem__)
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(ManifestError, match="nested more than 100 levels"):
            check_tree(nested(depth, wrap))
    with pytest.raises(ManifestError, match="nested more than 100 levels"):
        decode(nested(MAX_DEPTH + 1, wrap), {}.__getitem__)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["a", "$int", "$float", "$bytes", "$tuple", "$set", "$size", "$dict", "$counter",
                 "$dtype", "$device", "$numpy", "$torch", "$no"]
            ),
            inner | st.sampled_from(["0x1", "7ff8000000000000", "YQ==", "int8", "cpu"]),
            max_size=2,
        )
    ),
    max_leaves=8,
)  # fmt: skip


@given(TREES)
def test_decode_refuses_with_one_error_and_makes_nothing_else(tree):
    """No tree makes `decode` fail otherwise, and what it makes encodes again."""
    try:
        check_tree(tree)
    except ManifestError:
        return
    try:
        value = decode(tree, {}.__getitem__)
    except ManifestError:
        return
    encode(value, "p")


@pytest.mark.parametrize(
    "tree",
    [
        {"$no": 1}, {"$tuple": [], "a": 1}, {"a": 1, "$set": []}, {"$int": 5}, {"$int": "1"},
        {"$int": "0x"}, {"$float": "7ff8"}, {"$float": "7FF8000000000000"}, {"$bytes": "a"},
        {"$bytes": "YQ=\n"}, {"$set": {}}, {"$dict": [[1]]}, {"$dict": {"a": 1}}, {"$dtype": []},
        {"$device": 0}, {"$numpy": "int8"}, {"$numpy": ["int8", "0"]}, {"$torch": [1, "00"]},
        {"$tensor": None}, {"$ndarray": ["a"]}, [[{"x": {"$tuple": [{"$eval": ""}]}}]],
    ],
)  # fmt: skip
def test_what_is_refused(tree):
    with pytest.raises(ManifestError, match="an object has"):
        check_tree(tree)
