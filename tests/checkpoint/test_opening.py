import pytest
import xxhash

from eke.checkpoint import CorruptCheckpoint, Storage, opening
from eke.checkpoint.manifest import MANIFEST
from eke.checkpoint.opening import glance, open_manifest, open_objects


def test_objects_are_read_by_provider(saved):
    _, path = saved
    manifest = open_manifest(path, Storage())
    objects = open_objects(path, "rank00000.objects.json", manifest, Storage())
    assert list(objects) == ["model", "optimizer", "scheduler", "rng", "notes"]
    assert objects["model"] is None
    assert objects["notes"]["seen"] == 18


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda f: f.unlink(), "incomplete"),
        (lambda f: f.write_bytes(f.read_bytes()[:-1]), "incomplete"),
        (lambda f: f.write_bytes(f.read_bytes() + b" "), "corrupt"),
        (lambda f: f.write_bytes(f.read_bytes().replace(b"seen", b"sean")), "corrupt"),
    ],
)
def test_a_file_of_objects_that_is_not_the_one_written(saved, change, kind):
    _, path = saved
    manifest = open_manifest(path, Storage())
    change(path / "rank00000.objects.json")
    with pytest.raises(CorruptCheckpoint) as caught:
        open_objects(path, "rank00000.objects.json", manifest, Storage())
    [problem] = caught.value.problems
    assert (problem.file, problem.kind) == ("rank00000.objects.json", kind)


def test_a_manifest_too_long_to_be_one(saved, monkeypatch):
    monkeypatch.setattr("eke.checkpoint.opening.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CorruptCheckpoint, match="at most 100 are allowed"):
        open_manifest(saved[1], Storage())


def test_a_glance_at_a_manifest_that_is_none_of_ours(tmp_path):
    path = tmp_path / "step-000000001"
    path.mkdir()
    assert glance(path, Storage()).kind == "incomplete"
    for body in (
        b'{"files":[]',
        b'{"files":{"a":{}}',
        b'{"files":{"a":{"bytes":"1"}}',
        b'{"files":{"../a":{"bytes":1}}',
        b'{"files":{},"deep":' + b"[" * 100_000 + b"]" * 100_000,
        b'{"other":1',
        b"[",
    ):
        digest = xxhash.xxh3_128_hexdigest(body).encode()
        (path / MANIFEST).write_bytes(body + b',"digest":"' + digest + b'"}\n')
        assert glance(path, Storage()).kind == "foreign"


def test_a_glance_does_not_read_tensors(saved, faulty):
    _, path = saved
    assert glance(path, faulty) is None
    assert faulty.calls["open"] == 1
    known = dict(opening._known_lengths)
    assert glance(path, faulty) is None
    assert opening._known_lengths == known
    for number in range(2 * opening.MOST_KNOWN):
        opening._lengths(b'{"files":{},"n":%d}' % number)
    assert len(opening._known_lengths) <= opening.MOST_KNOWN
