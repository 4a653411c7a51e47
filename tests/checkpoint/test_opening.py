import pytest

from eke.checkpoint import CorruptCheckpoint, Storage
from eke.checkpoint.opening import open_manifest, open_objects


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
