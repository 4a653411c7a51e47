import subprocess
import sys

import pytest

from eke.checkpoint import CorruptCheckpoint, inspect, overview
from eke.checkpoint.layout import temporary_name
from eke.checkpoint.owner import me, new_token
from eke.errors import InputError


def test_overview_tells_checkpoints_from_what_crashes_left(saved):
    _, path = saved
    root = path.parent
    (root / "step-000000004").mkdir()
    (root / "step-000000005").mkdir()
    (root / "step-000000005" / "MANIFEST.json").write_text("{}")
    (root / temporary_name("step", 6, new_token(me()))).mkdir()
    (root / temporary_name("delete", 2, new_token(me()._replace(pid=1, start=1)))).mkdir()
    rows = {(row["step"], row["status"]) for row in overview(root)}
    assert rows == {
        (3, "committed"),
        (4, "incomplete"),
        (5, "damaged"),
        (6, "saving"),
        (2, "debris"),
    }
    [row] = [row for row in overview(root) if row["step"] == 3]
    assert [one["name"] for one in overview(path)] == [path.name]
    assert row["bytes"] == sum(f.stat().st_size for f in path.iterdir())
    assert row["name"] == path.name
    assert row["age_s"] >= 0


def test_what_a_glance_shows_is_shown(saved):
    _, path = saved
    file = path / "rank00000.state.safetensors"
    whole = file.read_bytes()

    def row():
        [one] = overview(path.parent)
        return one["status"], one["problem"]

    assert row() == ("committed", None)
    file.write_bytes(whole[:-1])
    lost = f"it has {len(whole) - 1} of its {len(whole)} bytes"
    assert row() == ("damaged", f"{file.name}: {lost}")
    file.write_bytes(whole + b"x")
    assert row()[1].endswith(f"bytes, not {len(whole)}")
    file.unlink()
    assert row() == ("damaged", f"{file.name}: the file is missing")
    file.write_bytes(whole[::-1])
    assert row() == ("committed", None), "what no glance can see is for verify"
    manifest = path / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert row() == ("damaged", "MANIFEST.json: its digest is not that of its bytes")
    manifest.unlink()
    assert row() == ("incomplete", None)


def test_inspect(saved):
    run, path = saved
    facts = inspect(path)
    assert (facts["step"], facts["world_size"], facts["mesh"]) == (3, 1, {"data": 1})
    assert facts["providers"].keys() == {"model", "optimizer", "scheduler", "rng", "notes"}
    model = facts["providers"]["model"]
    assert model["tensors"].keys() == run.model.state_dict().keys()
    assert model["tensors"]["head.weight"]["alias_of"] == "model/embed.weight"
    assert model["tensors"]["inner.bias"]["group"] == "frozen"
    assert model["tensors"]["embed.weight"]["shape"] == [23, 8]
    assert model["bytes"] == sum(
        t.numel() * t.element_size()
        for n, t in run.model.state_dict().items()
        if n != "head.weight"
    )
    assert facts["providers"]["rng"]["per_rank"]
    assert inspect(path.parent) == facts


def test_what_cannot_be_inspected(saved, tmp_path):
    _, path = saved
    with pytest.raises(InputError):
        overview(tmp_path / "absent")
    (path / "MANIFEST.json").unlink()
    with pytest.raises(CorruptCheckpoint, match="incomplete"):
        inspect(path)


def test_reading_a_directory_needs_no_torch(saved):
    script = (
        "import sys, eke.checkpoint as c\n"
        f"path = {str(saved[1])!r}\n"
        "assert c.verify(path).ok and c.inspect(path) and c.overview(path)\n"
        "assert c.steps(path) == [] and c.latest(path) is None\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
