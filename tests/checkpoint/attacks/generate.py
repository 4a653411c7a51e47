"""Makes the checkpoints in this folder: each is wrong in one way, and must be refused.

An attacker can compute digests, so all of them have right ones unless a digest is the point.
`python tests/checkpoint/attacks/generate.py` writes them anew; a test compares them with what is
committed. What git cannot hold (pipes, devices) or should not (what is large) is made by the tests.
"""

from __future__ import annotations

import copy
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

TENSORS, OBJECTS = "rank00000.state.safetensors", "rank00000.objects.json"
SEEN_BY = {
    "manifest": ("verify", "restore", "inspect", "load_tensors", "export"),
    "data": ("verify", "restore", "load_tensors", "export"),
    "header": ("verify", "restore"),
    "objects": ("verify", "restore", "export"),
    "value": ("restore", "export"),
}
"""Who reads that part of a checkpoint, and so must refuse it."""


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class Made:
    """A checkpoint that can be spoilt. `text` is the manifest as JSON, if not `manifest`."""

    def __init__(self) -> None:
        data = {
            "model/w": struct.pack("<6f", *range(6)),
            "notes/t": struct.pack("<2f", 7, 8),
            "model/b": bytes(range(4)),
        }
        layout = {"model/w": ("F32", [2, 3]), "notes/t": ("F32", [2]), "model/b": ("U8", [4])}
        self.header: dict[str, Any] = {}
        place = 0
        for name, content in data.items():
            dtype, shape = layout[name]
            offsets = [place, place + len(content)]
            self.header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            place += len(content)
        self.data = b"".join(data.values())
        self.objects: dict[str, Any] = {
            "model": None,
            "notes": {"a": [1, {"$tuple": [2.5]}], "t": {"$tensor": "notes/t"}},
        }
        self.files = {TENSORS: self.tensor_file(), OBJECTS: self.object_file()}
        base = len(self.files[TENSORS]) - len(self.data)
        self.manifest: dict[str, Any] = {
            "format": "eke-checkpoint",
            "version": 1,
            "step": 1,
            "world_size": 1,
            "mesh": {},
            "created_unix_s": 1.7e9,
            "eke": "0",
            "torch": "2",
            "files": {},
            "tensors": {
                name: {
                    "dtype": {"F32": "float32", "U8": "uint8"}[entry["dtype"]],
                    "shape": entry["shape"],
                    "group": "state",
                    "role": "object" if name == "notes/t" else "segment",
                    "shards": [
                        {
                            "file": TENSORS,
                            "key": name,
                            "offset": [0] * len(entry["shape"]),
                            "shape": entry["shape"],
                            "begin": base + entry["data_offsets"][0],
                            "end": base + entry["data_offsets"][1],
                            "xxh3_128": digest(data[name]),
                        }
                    ],
                }
                for name, entry in self.header.items()
            },
            "aliases": {"model/tied": "model/w"},
            "objects": {
                name: {"per_rank": False, "files": [OBJECTS]} for name in ("model", "notes")
            },
        }
        self.manifest = copy.deepcopy(self.manifest)  # lists were shared with the header
        self.measure()
        self.text: str | None = None
        self.raw: bytes | None = None

    def measure(self) -> None:
        """State every file's length and hash as they are."""
        self.manifest["files"] = {
            name: {"bytes": len(content), "xxh3_128": digest(content)}
            for name, content in self.files.items()
        }

    def tensor_file(self, header: bytes | None = None) -> bytes:
        body = header or json.dumps(self.header, separators=(",", ":")).encode()
        body += b" " * (768 - len(body))  # one length for all, so that the data stays where it is
        return struct.pack("<Q", len(body)) + body + self.data

    def object_file(self) -> bytes:
        return json.dumps(
            {"format": "eke-objects", "version": 1, "rank": 0, "objects": self.objects}
        ).encode()

    def tensor(self, name: str = "model/w") -> dict[str, Any]:
        entry: dict[str, Any] = self.manifest["tensors"][name]
        return entry

    def shard(self, name: str = "model/w") -> dict[str, Any]:
        entry: dict[str, Any] = self.tensor(name)["shards"][0]
        return entry

    def manifest_bytes(self) -> bytes:
        if self.raw is not None:
            return self.raw
        text = self.text or json.dumps(self.manifest, separators=(",", ":"))
        body = text.encode()[:-1]
        return body + f',"digest":"{digest(body)}"}}\n'.encode()

    def write(self, step: Path) -> None:
        step.mkdir(parents=True)
        for name, content in self.files.items():
            (step / name).write_bytes(content)
        if self.raw != b"absent":
            (step / "MANIFEST.json").write_bytes(self.manifest_bytes())


class Attack(NamedTuple):
    kind: str
    part: str
    spoil: Callable[[Made], None]


ATTACKS: dict[str, Attack] = {}


def attack(kind: str, part: str) -> Callable[[Callable[[Made], None]], Callable[[Made], None]]:
    def add(spoil: Callable[[Made], None]) -> Callable[[Made], None]:
        ATTACKS[spoil.__name__.replace("_", "-")] = Attack(kind, part, spoil)
        return spoil

    return add


def attacks(kind: str, part: str, **spoilers: Callable[[Made], Any]) -> None:
    for name, spoil in spoilers.items():
        ATTACKS[name.replace("_", "-")] = Attack(kind, part, spoil)


# ------------------------------------------------------------------ the manifest's bytes


def raw(change: Callable[[bytes], bytes]) -> Callable[[Made], None]:
    def spoil(made: Made) -> None:
        made.raw = change(made.manifest_bytes())

    return spoil


def text(old: str, new: str) -> Callable[[Made], None]:
    def spoil(made: Made) -> None:
        whole = json.dumps(made.manifest, separators=(",", ":"))
        assert old in whole
        made.text = whole.replace(old, new, 1)

    return spoil


attacks(
    "corrupt",
    "manifest",
    manifest_truncated=raw(lambda data: data[:-20]),
    manifest_bit_flipped=raw(lambda data: data[:30] + bytes([data[30] ^ 4]) + data[31:]),
    manifest_empty=raw(lambda data: b""),
    manifest_is_a_list=text('{"format"', '[{"format"'),
    json_key_twice=text('"step":1', '"step":1,"step":2'),
    json_nan=text('"created_unix_s":1700000000.0', '"created_unix_s":NaN'),
    json_infinity=text('"created_unix_s":1700000000.0', '"created_unix_s":1e999'),
    json_beyond_calendars=text('"created_unix_s":1700000000.0', '"created_unix_s":1e300'),
    json_huge_integer=text('"step":1', f'"step":1{"0" * 5000}'),
    json_nested=text('"mesh":{}', f'"mesh":{"[" * 3000}{"]" * 3000}'),
    json_bytes_that_are_no_text=raw(
        lambda data: (
            (body := data[:-46].replace(b'"eke":"0"', b'"eke":"\xff"'))
            + f',"digest":"{digest(body)}"}}\n'.encode()
        )
    ),
    name_of_half_a_character=text('"model/tied"', '"model/\\ud800"'),
)
attacks("incomplete", "manifest", manifest_absent=raw(lambda data: b"absent"))
attacks(
    "foreign",
    "manifest",
    version_of_the_future=text('"version":1', '"version":2'),
    version_that_is_a_book=text('"version":1', f'"version":"{"x" * 3000}"'),
    format_of_others=text("eke-checkpoint", "torch-checkpoint"),
)

# ------------------------------------------------------------------ the manifest's values


def named(file: str) -> Callable[[Made], None]:
    """A tensor file that is called so."""

    def spoil(made: Made) -> None:
        made.manifest["files"][file] = made.manifest["files"].pop(TENSORS)
        for entry in made.manifest["tensors"].values():
            entry["shards"][0]["file"] = file

    return spoil


attacks(
    "corrupt",
    "manifest",
    path_to_the_parent=named("../outside.safetensors"),
    path_absolute=named("/etc/passwd"),
    path_below=named("a/b.safetensors"),
    path_parent=named(".."),
    path_hidden=named(".tmp-step-000000001-x"),
    path_with_nul=named("a\0b"),
    path_with_newline=named("a\nb"),
    path_of_windows=named("C:\\b"),
    step_of_another=lambda m: m.manifest.update(step=2),
    step_negative=lambda m: m.manifest.update(step=-1),
    step_that_is_true=lambda m: m.manifest.update(step=True),
    step_with_a_fraction=lambda m: m.manifest.update(step=1.0),
    world_size_beyond=lambda m: m.manifest.update(world_size=2**62 + 1),
    digest_in_capitals=lambda m: m.shard().update(xxh3_128="A" * 32),
    dtype_unknown=lambda m: m.tensor().update(dtype="object"),
    dtype_that_does_not_fit=lambda m: m.tensor().update(dtype="float64"),
    role_unknown=lambda m: m.tensor().update(role="code"),
    shape_of_many_dimensions=lambda m: m.tensor().update(shape=[1] * 65),
    shape_that_overflows=lambda m: m.tensor().update(shape=[2**62, 2**62]),
    shape_that_does_not_fit=lambda m: [x.update(shape=[3, 3]) for x in (m.tensor(), m.shard())],
    range_outside_its_file=lambda m: m.shard().update(begin=10**9, end=10**9 + 24),
    range_backwards=lambda m: m.shard().update(begin=m.shard()["end"], end=m.shard()["begin"]),
    ranges_that_overlap=lambda m: m.shard("notes/t").update(
        begin=m.shard()["begin"] + 4, end=m.shard()["begin"] + 12
    ),
    key_twice_in_a_file=lambda m: m.shard("notes/t").update(key="model/w"),
    file_not_listed=lambda m: m.shard().update(file="rank00001.state.safetensors"),
    shards_none=lambda m: m.tensor().update(shards=[]),
    shards_that_leave_a_gap=lambda m: m.tensor().update(shape=[3, 3]),
    shards_doubled=lambda m: m.tensor()["shards"].append(m.shard()),
    shards_outside=lambda m: m.shard().update(offset=[1, 0]),
    shards_of_other_dimensions=lambda m: m.shard().update(shape=[6]),
    alias_to_nowhere=lambda m: m.manifest.update(aliases={"model/tied": "model/none"}),
    alias_of_itself=lambda m: m.manifest.update(aliases={"model/a": "model/a"}),
    aliases_in_a_circle=lambda m: m.manifest.update(
        aliases={"model/x": "model/y", "model/y": "model/x"}
    ),
    alias_over_a_tensor=lambda m: m.manifest.update(aliases={"model/b": "model/w"}),
    object_in_a_file_not_listed=lambda m: m.manifest["objects"]["model"].update(files=["x.json"]),
    object_of_too_few_ranks=lambda m: m.manifest["objects"]["model"].update(files=[]),
)  # fmt: skip


@attack("corrupt", "manifest")
def shape_empty_that_overflows(made: Made) -> None:
    shape = [0, 2**62, 2**62]
    made.tensor().update(shape=shape)
    made.shard().update(shape=shape, offset=[0, 0, 0], end=made.shard()["begin"])


@attack("corrupt", "manifest")
def shards_that_add_up_but_overlap(made: Made) -> None:
    first, begin = made.shard(), made.shard()["begin"]
    halves = [{**first, "shape": [1, 3], "begin": begin, "end": begin + 12, "key": "1"}]
    halves.append({**halves[0], "begin": begin + 12, "end": begin + 24, "key": "2"})
    made.tensor()["shards"] = halves


# ------------------------------------------------------------------ the data


def content(file: str, change: Callable[[bytes], bytes]) -> Callable[[Made], None]:
    """The file is another than the manifest says."""

    def spoil(made: Made) -> None:
        made.files[file] = change(made.files[file])

    return spoil


attacks(
    "corrupt",
    "data",
    data_bit_flipped=content(TENSORS, lambda d: d[:-30] + bytes([d[-30] ^ 1]) + d[-29:]),
    data_with_more=content(TENSORS, lambda d: d + b"\0"),
)
attacks(
    "incomplete",
    "data",
    data_truncated=content(TENSORS, lambda d: d[:-3]),
    data_absent=lambda m: m.files.pop(TENSORS),
)


@attack("corrupt", "data")
def data_that_the_file_hash_agrees_with(made: Made) -> None:
    made.data = bytes([made.data[0] ^ 1]) + made.data[1:]
    made.files[TENSORS] = made.tensor_file()
    made.measure()


@attack("incomplete", "data")
def data_of_terabytes(made: Made) -> None:
    """The manifest agrees with itself: only the real file can tell."""
    size = 2**44
    made.tensor("model/b").update(shape=[size])
    begin = made.shard("model/b")["begin"]
    made.shard("model/b").update(shape=[size], end=begin + size)
    made.manifest["files"][TENSORS]["bytes"] = begin + size


# ------------------------------------------------------------------ a tensor file's own header


def header(change: Callable[[Made], bytes]) -> Callable[[Made], None]:
    def spoil(made: Made) -> None:
        made.files[TENSORS] = change(made)
        made.measure()

    return spoil


def longer(length: int) -> Callable[[Made], None]:
    return header(lambda m: struct.pack("<Q", length) + m.files[TENSORS][8:])


def rewritten(old: str, new: str) -> Callable[[Made], None]:
    def change(made: Made) -> bytes:
        body = json.dumps(made.header, separators=(",", ":"))
        assert old in body
        return made.tensor_file(body.replace(old, new, 1).encode())

    return header(change)


attacks(
    "corrupt",
    "header",
    header_of_exabytes=longer(2**63),
    header_beyond_the_file=longer(10_000),
    header_of_nothing=longer(0),
    header_nested=header(lambda m: m.tensor_file(b'{"a":' * 150)),
    header_key_twice=rewritten('{"model/w"', '{"model/b":{},"model/w"'),
    header_of_another_dtype=rewritten('"F32","shape":[2,3]', '"I32","shape":[2,3]'),
    header_of_another_shape=rewritten('"shape":[2,3]', '"shape":[3,2]'),
    header_that_overflows=rewritten('"shape":[2,3]', f'"shape":[{2**62},{2**62}]'),
    header_with_a_hole=rewritten("[0,24]", "[1,25]"),
    header_that_swaps=rewritten('"notes/t"', '"notes/u"'),
)

# ------------------------------------------------------------------ objects


def value(tree: Any, **other: Any) -> Callable[[Made], None]:
    def spoil(made: Made) -> None:
        made.objects["notes"] = tree
        made.files[OBJECTS] = made.object_file()
        made.measure()

    return spoil


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def objects_text(old: bytes, new: bytes) -> Callable[[Made], None]:
    def spoil(made: Made) -> None:
        assert old in made.files[OBJECTS]
        made.files[OBJECTS] = made.files[OBJECTS].replace(old, new, 1)
        made.measure()

    return spoil


attacks(
    "corrupt",
    "objects",
    object_tag_unknown=value({"$eval": "1"}),
    object_tag_beside_a_key=value({"$tuple": [], "a": 1}),
    object_tag_of_the_wrong_kind=value({"$tuple": "abc"}),
    object_integer_that_is_none=value({"$int": "0xg"}),
    object_float_that_is_none=value({"$float": "7f"}),
    object_bytes_that_are_none=value({"$bytes": "a"}),
    object_pairs_of_three=value({"$dict": [[1, 2, 3]]}),
    object_scalar_of_nothing=value({"$numpy": ["int8", ""]}),
    object_nested=value(nested(300)),
    object_of_no_tensor=value({"$tensor": "model/none"}),
    object_key_twice=objects_text(b'"a": [1', b'"t": 1, "a": [1'),
    object_infinity=objects_text(b"2.5", b"1e999"),
    object_not_there=objects_text(b'"notes"', b'"other"'),
    objects_bit_flipped=content(OBJECTS, lambda d: d.replace(b"2.5", b"2.7")),
)
attacks(
    "foreign",
    "objects",
    objects_of_the_future=objects_text(b'"version": 1', b'"version": 9'),
)
attacks("incomplete", "objects", objects_absent=lambda m: m.files.pop(OBJECTS))
attacks(
    "corrupt",
    "value",
    value_that_has_no_hash=value({"$set": [[1]]}),
    value_of_no_dtype=value({"$dtype": "load"}),
    value_of_no_device=value({"$device": "moon:0"}),
    value_of_an_object_scalar=value({"$numpy": ["object", "0000000000000000"]}),
    value_of_half_a_scalar=value({"$torch": ["float64", "0000"]}),
)


def make(name: str) -> Made:
    """The checkpoint of one attack."""
    made = Made()
    ATTACKS[name].spoil(made)
    return made


def main(folder: Path) -> None:
    """Write all of them to a folder."""
    for old in folder.iterdir():
        if old.is_dir() and old.name != "__pycache__":
            shutil.rmtree(old)
    for name in ATTACKS:
        make(name).write(folder / name / "step-000000001")


if __name__ == "__main__":
    main(Path(__file__).parent)
