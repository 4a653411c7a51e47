import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.objects import decode, encode
from eke.checkpoint.references import references

TAGS = ("$tensor", "$ndarray")
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NAMED = st.tuples(st.sampled_from(TAGS), st.text()).map(lambda pair: dict([pair]))
TREES = st.recursive(
    LEAVES | NAMED,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.sampled_from([*TAGS, "$dict"]), inner, max_size=4)
    ),
    max_leaves=25,
)
OBJECTS = st.recursive(
    st.integers()
    | st.text()
    | st.integers(1, 3).map(torch.zeros)
    | st.integers(1, 3).map(np.zeros),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(TAGS) | st.integers(), inner, max_size=4)
    ),
    max_leaves=15,
)


def by_recursion(tree):
    if isinstance(tree, list):
        return [name for item in tree for name in by_recursion(item)]
    if isinstance(tree, dict):
        own = [tree[tag] for tag in TAGS if isinstance(tree.get(tag), str)]
        return own + [name for item in tree.values() for name in by_recursion(item)]
    return []


@given(TREES)
def test_every_name_in_order(tree):
    assert list(references(tree)) == by_recursion(tree)
    assert list(references(json.loads(json.dumps(tree)))) == by_recursion(tree)


@given(OBJECTS)
def test_they_are_what_decoding_asks_for_in_its_order(value):
    tree, tensors = encode(value, "p")
    asked = []

    def tensor(name):
        asked.append(name)
        return tensors[name]

    decode(tree, tensor)
    assert list(references(tree)) == asked
    assert sorted(asked) == sorted(tensors)


def test_a_name_in_two_places_is_named_twice():
    assert list(references([{"$tensor": "a"}, {"x": {"$ndarray": "a"}}])) == ["a", "a"]


@pytest.mark.parametrize(
    "value",
    ["$tensor", ["$tensor", "x"], {"$tensor": "x"}, {"a": {"$ndarray": "x"}}, ("$ndarray",)],
)
def test_a_users_own_dollar_is_no_reference(value):
    tree, _ = encode(value, "p")
    assert list(references(tree)) == []


@pytest.mark.parametrize("body", [None, 5, 1.5, True, [], {}])
def test_a_damaged_tag_names_nothing(body):
    assert list(references({"$tensor": body, "$ndarray": body})) == []


def test_depth_does_not_matter():
    tree = {"$tensor": "deep"}
    for level in range(50_000):
        tree = [tree] if level % 2 else {"a": tree}
    assert list(references(tree)) == ["deep"]
    while tree and "$tensor" not in tree:  # Python's own release of it would recurse
        tree = tree.pop() if isinstance(tree, list) else tree.pop("a")


def test_it_needs_no_torch():
    script = "import sys, eke.checkpoint.references; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
