import json
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.checkpoint.checks import ManifestError
from eke.checkpoint.dtypes import STORED, tensor_bytes
from eke.checkpoint.manifest import (
    FileEntry,
    Manifest,
    ObjectEntry,
    Shard,
    TensorEntry,
    check,
    digest_holds,
    merge,
    parse,
    serialise,
)

HASH = "0" * 31 + "a"


def small():
    shards = (
        Shard("rank00000.state.safetensors", "model/w", (0, 0), (2, 3), 4096, 4120, HASH),
        Shard("rank00001.state.safetensors", "model/w", (2, 0), (1, 3), 4096, 4108, HASH),
    )
    return Manifest(
        step=7,
        world_size=2,
        mesh={"data": 2},
        created_unix_s=1.5,
        eke="0.1.0",
        torch="2.13",
        files={
            "rank00000.state.safetensors": FileEntry(4120, HASH),
            "rank00001.state.safetensors": FileEntry(4108, HASH),
            "rank00000.objects.json": FileEntry(100, HASH),
            "rank00001.objects.json": FileEntry(100, HASH),
        },
        tensors={"model/w": TensorEntry("float32", (3, 3), "state", "segment", shards)},
        aliases={"model/v": "model/w"},
        objects={
            "model": ObjectEntry(False, ("rank00000.objects.json",)),
            "rng": ObjectEntry(True, ("rank00000.objects.json", "rank00001.objects.json")),
        },
    )


def signed(values):
    """The bytes of a manifest with these values and a right digest: what an attacker writes."""
    values = dict(values)
    values.pop("digest", None)
    body = json.dumps(values, separators=(",", ":")).encode()[:-1]
    return body + f',"digest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def test_round_trip_and_lookups():
    manifest = small()
    check(manifest)
    assert parse(serialise(manifest)) == manifest
    assert manifest.names() == ["model/v", "model/w"]
    assert manifest.find("model/v") is manifest.tensors["model/w"]
    assert manifest.find("model/x") is None
    assert manifest.data_bytes == 4120 + 4108 + 200


NAMES = st.text(min_size=1, max_size=12).filter(lambda s: s.isprintable())


@settings(max_examples=60)
@given(
    st.dictionaries(
        NAMES,
        st.tuples(st.sampled_from(sorted(STORED)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_round_trip_of_any_tensors(tensors):
    entries, position = {}, 4096
    for name, (dtype, shape) in tensors.items():
        end = position + tensor_bytes(dtype, tuple(shape))
        shard = Shard("f.st", name, (0,) * len(shape), tuple(shape), position, end, HASH)
        entries[name] = TensorEntry(dtype, tuple(shape), "state", "object", (shard,))
        position = end
    manifest = replace(
        small(), files={"f.st": FileEntry(position, HASH)}, tensors=entries, aliases={}, objects={}
    )
    assert parse(serialise(manifest)) == manifest


def test_every_flipped_bit_lost_byte_and_added_byte_is_refused():
    data = serialise(small())
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            assert not digest_holds(bytes(changed)), (place, bit)
        assert not digest_holds(data[:place])
        assert not digest_holds(data[:place] + data[place + 1 :])
    assert not digest_holds(data + b" ")
    with pytest.raises(ManifestError, match="digest"):
        parse(data[:-1])


def attack(change):
    values = json.loads(serialise(small()))
    change(values)
    return signed(values)


def first(values):
    return values["tensors"]["model/w"]["shards"][0]


ATTACKS = {
    "file name climbs": lambda v: v["files"].update({"../passwd": {"bytes": 1, "xxh3_128": HASH}}),
    "shard in a climbing file": lambda v: first(v).update(file="../rank00000.state.safetensors"),
    "shard in an absolute file": lambda v: first(v).update(file="/etc/passwd"),
    "shard in an unlisted file": lambda v: first(v).update(file="other.safetensors"),
    "object in a climbing file": lambda v: v["objects"]["model"].update(files=["../x.json"]),
    "object in an unlisted file": lambda v: v["objects"]["model"].update(files=["x.json"]),
    "object of too few ranks": lambda v: v["objects"]["rng"]["files"].pop(),
    "range past the file": lambda v: first(v).update(begin=4100, end=4124),
    "range of another size": lambda v: first(v).update(end=4119),
    "range backwards": lambda v: first(v).update(begin=4120, end=4096),
    "negative begin": lambda v: first(v).update(begin=-24, end=0),
    "shape lies": lambda v: first(v).update(shape=[3, 2]),
    "shape is vast": lambda v: first(v).update(shape=[2**40, 2**40]),
    "whole shape lies": lambda v: v["tensors"]["model/w"].update(shape=[4, 3]),
    "dimensions lie": lambda v: v["tensors"]["model/w"].update(shape=[9]),
    "shards overlap": lambda v: v["tensors"]["model/w"]["shards"][1].update(offset=[1, 0]),
    "unknown dtype": lambda v: v["tensors"]["model/w"].update(dtype="__class__"),
    "unknown role": lambda v: v["tensors"]["model/w"].update(role="pickle"),
    "no shards": lambda v: v["tensors"]["model/w"].update(shards=[]),
    "shards is an object": lambda v: v["tensors"]["model/w"].update(shards={}),
    "alias of nothing": lambda v: v["aliases"].update({"model/u": "model/gone"}),
    "alias of an alias": lambda v: v["aliases"].update({"model/u": "model/v"}),
    "alias hides a tensor": lambda v: v["aliases"].update({"model/w": "model/w"}),
    "step is a float": lambda v: v.update(step=7.0),
    "step is negative": lambda v: v.update(step=-7),
    "bytes are true": lambda v: v["files"]["rank00000.objects.json"].update(bytes=True),
    "hash in capitals": lambda v: first(v).update(xxh3_128=HASH.upper()),
    "files is a list": lambda v: v.update(files=[]),
    "mesh is null": lambda v: v.update(mesh=None),
    "time is text": lambda v: v.update(created_unix_s="now"),
    "per_rank is a number": lambda v: v["objects"]["rng"].update(per_rank=1),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_with_a_right_digest_are_refused(name):
    with pytest.raises(ManifestError) as caught:
        parse(attack(ATTACKS[name]))
    assert caught.value.kind == "corrupt"


def test_two_tensors_on_the_same_bytes_are_refused():
    def share(values):
        twin = json.loads(json.dumps(values["tensors"]["model/w"]))
        for shard in twin["shards"]:
            shard["key"] = "model/twin"
        values["tensors"]["model/twin"] = twin

    with pytest.raises(ManifestError, match="shares bytes"):
        parse(attack(share))


def test_two_empty_tensors_of_one_key_are_refused():
    def same_key(values):
        shard = dict(first(values), offset=[0], shape=[0], begin=4120, end=4120)
        entry = {"dtype": "float32", "shape": [0], "group": "state", "role": "segment"}
        values["tensors"]["model/z"] = {**entry, "shards": [shard]}

    with pytest.raises(ManifestError, match="one key"):
        parse(attack(same_key))


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "somebody-elses"}, {"version": "1"}])
def test_other_formats_are_foreign(change):
    with pytest.raises(ManifestError) as caught:
        parse(attack(lambda values: values.update(change)))
    assert caught.value.kind == "foreign"


def test_not_an_object_not_json_and_too_deep():
    for body in (b"[1,2", b"{" * 5, b"[" * 50_000):
        data = body + f',"digest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()
        with pytest.raises(ManifestError):
            parse(data)


def report_of(rank):
    values = json.loads(serialise(small()))
    tensor = values["tensors"]["model/w"]
    tensor["shards"] = [tensor["shards"][rank]]
    mine = {name: entry for name, entry in values["files"].items() if f"rank0000{rank}" in name}
    return {"files": mine, "tensors": {"model/w": tensor}, "aliases": values["aliases"]}


def test_merge_puts_ranks_together():
    files, tensors, aliases = merge([report_of(0), report_of(1)])
    assert files == small().files
    assert tensors == small().tensors
    assert aliases == small().aliases


def test_merge_refuses_ranks_that_disagree():
    other = report_of(1)
    other["tensors"]["model/w"]["dtype"] = "int32"
    with pytest.raises(ManifestError, match="disagree"):
        merge([report_of(0), other])
    other = {"files": {}, "tensors": {}, "aliases": {"model/v": "model/x"}}
    with pytest.raises(ManifestError, match="alias of"):
        merge([report_of(0), other])
    with pytest.raises(ManifestError, match="two ranks"):
        merge([report_of(0), report_of(0)])


def test_a_rank_that_is_left_out_is_noticed():
    files, tensors, _ = merge([report_of(0)])
    with pytest.raises(ManifestError, match="add up"):
        check(replace(small(), files=files, tensors=tensors))
