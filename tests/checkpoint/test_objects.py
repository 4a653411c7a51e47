import gc
import json
import math
import os
import random
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.checks import ManifestError, strict_json
from eke.checkpoint.objects import MAX_DEPTH, _no_collections, _pausing, decode, encode, to_json
from eke.checkpoint.references import references
from eke.errors import InputError

FLOATS = st.floats() | st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack(">d", b)[0])
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | FLOATS.filter(lambda x: x == x)
    | st.text(st.characters())
    | st.binary(max_size=20)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:1")]),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.recursive(
    HASHABLE
    | FLOATS
    | st.lists(st.integers(0, 5), max_size=3).map(torch.Size)
    | st.floats(width=32).map(np.float32)
    | st.integers(-128, 127).map(np.int8)
    | st.booleans().map(np.bool_)
    | st.floats(width=32).map(lambda x: torch.tensor(x, dtype=torch.float32))
    | st.integers(0, 4).map(lambda n: torch.arange(n))
    | st.integers(0, 4).map(lambda n: np.arange(n, dtype=np.uint16).reshape(n, 1)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$int", "a", "a/b", ""]), inner, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(HASHABLE, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def through_json(value, name="p"):
    tree, tensors = encode(value, name)
    return decode(strict_json(to_json(tree)), tensors.__getitem__)


def same(a, b):
    """Equal in every type, order and bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, torch.Tensor):
        bits = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


@given(OBJECTS)
def test_round_trip_keeps_every_type_and_bit(value):
    assert same(through_json(value), value)


@given(st.dictionaries(st.text(max_size=3), OBJECTS, max_size=4), st.integers(0, 600))
def test_long_dicts_are_like_short_ones(few, more):
    """What is looked at in one sweep, and written in pieces, is the same as one by one."""
    value = {**{f"k{i}": (i, None, i % 3 / 2)[i % 3] for i in range(more)}, **few}
    assert same(through_json(value), value)
    tree, _ = encode(value, "p")
    alone = [encode([one], "p")[0][0] for one in value.values()]
    if type(tree.get("$dict", tree)) is dict and not any(torch_like(one) for one in alone):
        assert list(tree.values()) == alone
    for nested in (tree, {"a": {"b": tree}}, [tree]):
        assert exact(json.loads(to_json(nested))) == exact(nested)


def exact(tree):
    """As text: one for each order of keys, type and bit of a number."""
    return json.dumps(tree, allow_nan=False)


def torch_like(tree):
    return "$tensor" in (text := json.dumps(tree)) or "$ndarray" in text


@pytest.mark.parametrize("odd", [(2**53 + 1,), (float("nan"),), 2**80, float("inf"), (b"x", 1)])
@pytest.mark.parametrize("key", ["plain", "$dollar", "a\n$b", "", 5])
def test_one_odd_value_or_key_in_a_long_dict(odd, key):
    value = {**{f"k{i}": (i, (i, True), "x", None)[i % 4] for i in range(600)}, key: odd}
    assert same(through_json(value), value)
    tree, _ = encode(value, "p")
    assert ("$dict" in tree) == (key in ("$dollar", 5))
    assert exact(json.loads(to_json(tree))) == exact(tree)


@pytest.mark.parametrize("text", ["half a pair \ud800", "\U0001f600 \u2028 \x00 \\u0041", "é"])
def test_any_string_a_key_or_a_value(text):
    tree, _ = encode({text: text, "in": [text, -0.0, 5e-324, 1.7976931348623157e308]}, "p")
    assert exact(json.loads(to_json(tree))) == exact(tree)


def test_what_is_nested_as_deep_as_may_be_is_written_and_read():
    value = 1
    for _ in range(MAX_DEPTH // 2):
        value = {"$": (value,)}  # four levels of JSON each
    assert same(through_json(value), value)


@pytest.mark.parametrize("on", [True, False])
def test_many_new_containers_set_off_no_search_for_garbage(on):
    found = []
    note = lambda phase, info: found.append(info["generation"])  # noqa: E731
    was = gc.isenabled()
    (gc.enable if on else gc.disable)()
    gc.callbacks.append(note)
    try:
        encode({str(i): (i, None) for i in range(20_000)}, "p")
        during = [generation for generation in found if generation == 2]
        assert gc.isenabled() == on
    finally:
        gc.callbacks.remove(note)
        (gc.enable if was else gc.disable)()
    assert not during


def test_a_process_forked_meanwhile_searches_for_garbage():
    with _no_collections():
        child = os.fork()
        if not child:
            with _no_collections():
                paused = not gc.isenabled()
            os._exit(0 if paused and gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_interrupt_at_any_call_leaves_the_search_for_garbage_on():
    assert gc.isenabled()
    where = {"_no_collections", "__enter__", "__exit__"}

    def interrupt(frame, event, _):
        nonlocal left
        if event == "c_return" and frame.f_code.co_name in where:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    for at in range(1, 100):
        left = at
        sys.setprofile(interrupt)
        try:
            with _no_collections():
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if left > 0:
            break
        assert gc.isenabled(), f"after call {at}"
        if _pausing.locked():  # the interrupt came before it was known who has it
            _pausing.release()
    assert at > 6


@given(OBJECTS)
def test_references_are_the_tensors(value):
    tree, tensors = encode(value, "p")
    assert sorted(references(tree)) == sorted(tensors)
    assert all(name.startswith("p/") for name in tensors)


@given(st.sets(HASHABLE, max_size=6))
def test_a_set_always_encodes_alike(value):
    items = list(value)
    random.Random(0).shuffle(items)
    assert encode(value, "p") == encode(set(items), "p")


@pytest.mark.parametrize(
    "value",
    [
        float("nan"), -float("nan"), math.inf, -math.inf, -0.0, 5e-324,
        struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0],
        2**53, 2**53 + 1, -(2**53) - 1, 10**4000, True, 1, 1.0, "\ud800", "a\0b", {1: 1.0, "1": 2},
        {True: 0}, {None: 1, (1, 2): [3], b"x": {1}}, {"$int": "not a tag"}, {"$x": 1, "y": 2}, {},
        np.float64("nan"), np.complex64(1 - 2j), torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(True), torch.tensor(2 - 1j), np.zeros((0, 3)), np.arange(6)[::-2],
        np.asfortranarray(np.ones((2, 3), np.float16)), np.array(5), torch.zeros(2, 0),
        random.Random(1).getstate(),
    ],
)  # fmt: skip
def test_values_that_are_easy_to_get_wrong(value):
    assert same(through_json(value), value)


def test_a_huge_integer():
    value = [10**5000]
    assert through_json(value)[0] - value[0] == 0


def test_read_only_arrays():
    array = np.arange(3)
    array.flags.writeable = False
    assert same(through_json(array), array)


Point = namedtuple("Point", "x y")


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"), (print, "builtin_function"), (Point(1, 2), "Point"),
        (Text("a"), "Text"),
        (defaultdict(int), "defaultdict"), (bytearray(b"x"), "bytearray"), (1j, "complex"),
        (np.array(["a"]), "ndarray"), (np.array([1], dtype=">i4"), "ndarray"),
        (np.datetime64("2020-01-01"), "datetime64"), (np.str_("a"), "str_"), (range(3), "range"),
        (np.array([object()]), "ndarray"), (np.longdouble(1), "longdouble"), (Exception, "type"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_the_path_to_it(value, kind):
    with pytest.raises(InputError) as caught:
        encode({"a": [0, {"b": value}]}, "scheduler")
    message = str(caught.value)
    assert "scheduler['a']['1']['b']" in message
    assert kind in message
    assert "ObjectProvider" in message


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(2).to_sparse(), "layout"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
    ],
)
def test_unusual_tensors_are_refused(tensor, why):
    with pytest.raises(InputError, match=why):
        encode([tensor], "extra")


def test_a_tensor_as_a_key_is_refused():
    with pytest.raises(InputError, match="cannot hold"):
        encode({torch.ones(2): 1}, "extra")


def test_too_deep_and_endless():
    deep = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert same(through_json(deep), deep)
    with pytest.raises(InputError, match="levels deep"):
        encode([deep], "extra")
    endless = {}
    endless["self"] = endless
    with pytest.raises(InputError, match="contains itself"):
        encode(endless, "extra")


def test_names_never_collide():
    value = {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}, 1: torch.ones(3), "1": torch.ones(4)}
    _, tensors = encode(value, "p")
    assert set(tensors) == {"p/a/b", "p/a/b~2", "p/1", "p/1~2"}
    assert same(through_json(value), value)
    assert list(encode(torch.ones(1), "p")[1]) == ["p/value"]


@pytest.mark.parametrize(
    "tree",
    [
        {"$int": 5}, {"$int": "zz"}, {"$float": "7f"}, {"$float": 1}, {"$bytes": "?"},
        {"$tuple": 5},
        {"$set": [[1]]}, {"$dict": [[1]]}, {"$dict": [[[1], 2]]}, {"$dtype": "float33"},
        {"$dtype": "Tensor"}, {"$device": "moon"}, {"$numpy": ["object", "00"]},
        {"$numpy": ["int32", "00"]}, {"$torch": ["float32", "00"]}, {"$torch": ["load", "00"]},
        {"$torch": ["float32"]}, {"$eval": "1"}, {"$int": "0x1", "x": 1}, {"x": 1, "$int": "0x1"},
        {"$size": [-1, "a"]}, {"$counter": [[1, 2, 3]]}, {"$ndarray": 5}, object(),
    ],
)  # fmt: skip
def test_malformed_trees_are_refused(tree):
    def tensor(name):
        raise ManifestError(f"no tensor {name}")

    with pytest.raises(ManifestError):
        decode(tree, tensor)
