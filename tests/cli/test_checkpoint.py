import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from eke.checkpoint import Checkpointer, CorruptCheckpoint
from eke.cli.checkpoint import app
from eke.errors import EkeError, InputError


@pytest.fixture
def run(tmp_path):
    """A run directory with checkpoints of steps 1 and 2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    with Checkpointer(tmp_path / "run" / "checkpoints") as ck:
        ck.attach(model=model, rng=True)
        ck.save(1).wait()
        ck.save(2).wait()
    return tmp_path / "run"


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def step_dir(run, step):
    return run / "checkpoints" / f"step-{step:09d}"


def flip_last_byte(run, step):
    file = step_dir(run, step) / "rank00000.frozen.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()  # the other step has the same file by another name
    file.write_bytes(data)


def test_ls(run):
    (run / "checkpoints" / "step-000000007").mkdir()
    code, text = invoke("ls", run)
    assert code == 0
    rows = [line.split() for line in text.splitlines() if "step-" in line]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("1", "committed", "step-000000001"),
        ("2", "committed", "step-000000002"),
        ("7", "incomplete", "step-000000007"),
    ]
    code, text = invoke("ls", run / "checkpoints", "--json")
    assert [row["step"] for row in json.loads(text)] == [1, 2, 7]


def test_ls_shows_what_a_glance_finds(run):
    file = step_dir(run, 2) / "rank00000.state.safetensors"
    whole = file.read_bytes()
    file.unlink()  # the other step may have the same file by another name
    file.write_bytes(whole[:-3])
    code, text = invoke("ls", run)
    assert code == 0
    [line] = [line for line in text.splitlines() if "damaged" in line]
    assert f"damaged: {file.name}: it has {len(whole) - 3} of its {len(whole)} bytes" in line
    [one] = [row for row in json.loads(invoke("ls", run, "--json")[1]) if row["step"] == 2]
    assert (one["status"], one["problem"].split(":")[0]) == ("damaged", file.name)


def test_ls_of_nothing(tmp_path):
    assert invoke("ls", tmp_path) == (0, f"no checkpoints in {tmp_path}\n")
    with pytest.raises(InputError, match="no such directory"):
        invoke("ls", tmp_path / "absent")


def test_what_cannot_hold_checkpoints(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(EkeError, match="Too many levels of symbolic links"):
        invoke("verify", tmp_path / "loop")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a directory"):
        invoke("verify", tmp_path / "file")


def test_inspect(run):
    code, text = invoke("inspect", run)
    assert code == 0
    assert "step 2, saved" in text
    assert "by 1 rank(s)" in text
    assert "model: 4 tensor(s)" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "float32" in lines["0.weight"]
    assert "4x4" in lines["0.weight"]
    assert "is model/0.weight" in lines["1.weight"]
    assert "frozen" in lines["1.bias"]
    assert "each rank its own" in lines["rng:"]


def test_inspect_as_json(run):
    code, text = invoke("inspect", step_dir(run, 1), "--json")
    assert code == 0
    facts = json.loads(text)
    assert facts["step"] == 1
    assert facts["torch"] == torch.__version__
    tensor = facts["providers"]["model"]["tensors"]["0.weight"]
    assert (tensor["shape"], tensor["dtype"], tensor["bytes"]) == ([4, 4], "float32", 64)
    assert len(tensor["shards"][0]["xxh3_128"]) == 32


def test_inspect_something_damaged(run):
    (step_dir(run, 2) / "MANIFEST.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match="digest"):
        invoke("inspect", step_dir(run, 2))


def test_verify_a_sound_run(run):
    code, text = invoke("verify", run)
    assert code == 0
    assert text.count(": sound (") == 2
    code, text = invoke("verify", step_dir(run, 1), "--json")
    assert code == 0
    assert [report["ok"] for report in json.loads(text)] == [True]


def test_verify_names_tensor_and_file_of_what_is_corrupt(run):
    flip_last_byte(run, 1)
    code, text = invoke("verify", run)
    assert code == 1
    assert "corrupt: rank00000.frozen.safetensors, tensor model/1.bias: " in text
    assert "step-000000002: sound" in text
    code, text = invoke("verify", step_dir(run, 1), "--json")
    assert code == 1
    [problem] = json.loads(text)[0]["problems"]
    assert (problem["kind"], problem["tensor"]) == ("corrupt", "model/1.bias")
    assert invoke("verify", step_dir(run, 2))[0] == 0


def test_verify_tells_incomplete_and_foreign_by_exit_code(run, tmp_path):
    (step_dir(run, 2) / "notes.txt").write_text("x")
    assert invoke("verify", run)[0] == 5
    (step_dir(run, 1) / "rank00000.frozen.safetensors").unlink()
    assert invoke("verify", run)[0] == 4
    (step_dir(run, 1) / "MANIFEST.json").unlink()
    assert invoke("verify", step_dir(run, 1))[0] == 4
    (tmp_path / "pictures").mkdir()
    assert invoke("verify", tmp_path / "pictures")[0] == 5
    with pytest.raises(InputError):
        invoke("verify", tmp_path / "absent")


def test_diff(run):
    assert invoke("diff", step_dir(run, 1), step_dir(run, 2))[0] == 0
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    with Checkpointer(run / "other") as ck:
        ck.attach(model=model)
        ck.save(1).wait()
    code, text = invoke("diff", step_dir(run, 2), run / "other")
    assert code == 1
    rows = {row[0]: row[1] for line in text.splitlines() if len(row := line.split()) > 2}
    assert rows["model/0.weight"] == "changed"
    assert rows["model/1.bias"] == "removed"
    assert "tensor(s) differ" in text
    code, text = invoke("diff", step_dir(run, 1), step_dir(run, 2), "--json", "--all")
    assert code == 0
    assert {row["status"] for row in json.loads(text)} == {"same"}


def test_gc(run):
    from eke.checkpoint.layout import temporary_name
    from eke.checkpoint.owner import me, new_token

    root = run / "checkpoints"
    debris = root / temporary_name("step", 9, new_token(me()._replace(boot="00000000")))
    debris.mkdir()
    assert invoke("gc", run) == (0, f"removed {debris}\n")
    assert invoke("gc", run) == (0, f"nothing to remove in {run}\n")
    assert invoke("gc", run, "--keep-last", "1") == (0, f"removed {step_dir(run, 1)}\n")
    assert [p.name for p in root.iterdir()] == ["step-000000002"]
    with pytest.raises(InputError, match="at least 1"):
        invoke("gc", run, "--keep-last", "0")
    with pytest.raises(InputError, match="no such directory"):
        invoke("gc", run / "absent")
    with pytest.raises(InputError, match="the directory of one step"):
        invoke("gc", step_dir(run, 2))


def test_torch_is_not_loaded(run):
    script = (
        f"import sys\nfrom eke.cli.checkpoint import app\ntry:\n    app(['verify', {str(run)!r}])\n"
    )
    script += (
        "except SystemExit as end:\n    assert end.code == 0\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True)


def test_export(run, tmp_path):
    code, text = invoke("export", run, "--to", "torch", tmp_path / "out")
    assert (code, text) == (0, f"exported {step_dir(run, 2)} to {tmp_path / 'out'}\n")
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert (state["step"], state["tensors"]["model/0.weight"].shape) == (2, (4, 4))
    invoke("export", step_dir(run, 1), tmp_path / "dcp", "--to", "dcp")
    assert (tmp_path / "dcp" / ".metadata").exists()
    with pytest.raises(InputError, match="is not empty"):
        invoke("export", run, tmp_path / "out", "--to", "dcp")
    with pytest.raises(InputError, match="no such export format; got 'onnx'"):
        invoke("export", run, tmp_path / "new", "--to", "onnx")
    with pytest.raises(InputError, match=r"has no model configuration.*--config FOLDER"):
        invoke("export", run, tmp_path / "new", "--to", "hf")
    assert not (tmp_path / "new").exists()


def test_export_of_a_run_that_is_not_finished(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from eke.data import builtin_tokenizer, open_source
    from eke.models import BUILTIN_VOCAB, load_model
    from eke.training import RunConfig

    config = RunConfig.from_mapping(
        {"model": {"source": "builtin:tiny"}, "data": {"train": "builtin:pydocs"}}
    )
    run = tmp_path / "run"
    tokenizer = builtin_tokenizer(open_source("builtin:pydocs"), BUILTIN_VOCAB["tiny"])
    model = load_model("builtin:tiny", tokenizer, seed=0).model
    with Checkpointer(run / "checkpoints") as ck:
        ck.attach(model=model)
        ck.save(1).wait()
    (run / "run.toml").write_text(config.to_toml())
    assert invoke("export", run, tmp_path / "hf", "--to", "hf")[0] == 0
    ids = AutoTokenizer.from_pretrained(tmp_path / "hf")("def", return_tensors="pt").input_ids
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert loaded.config.use_cache
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
