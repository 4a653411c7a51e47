"""The folder for transformers: the same logits to the bit, from one rank and from two."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eke.checkpoint import Checkpointer, export
from eke.checkpoint.export_hf import described, shards, write_hf
from eke.checkpoint.layout import checkpoint_of
from eke.checkpoint.manifest import TensorEntry
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.reader import Reader
from eke.checkpoint.storage import Storage
from eke.errors import InputError


def logits_of(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.eval()(torch.arange(12).reshape(1, 12)).logits


@pytest.mark.parametrize("ranks", [1, 2])
def test_transformers_loads_it_with_equal_logits(llamas, tmp_path, ranks):
    run = llamas[ranks]
    out = export(run, tmp_path / "out", to="hf", config=run / "config")
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(out / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata()["format"] == "pt"
    assert torch.equal(logits_of(out), load_file(run / "live.safetensors")["logits"])


def test_many_files_and_an_index(llamas, tmp_path):
    run = llamas[2]
    path, out = checkpoint_of(run), tmp_path / "out"
    out.mkdir()
    with Reader(path, open_manifest(path, Storage()), Storage()) as reader:
        write_hf(reader, run / "config", out, shard_bytes=30_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    tensors = {k: v for file in files for k, v in load_file(out / file).items()}
    assert sorted(tensors) == sorted(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in tensors.values())
    assert torch.equal(logits_of(out), load_file(run / "live.safetensors")["logits"])


def test_a_runs_checkpoint_takes_the_runs_model_folder(llamas, tmp_path):
    run = llamas[1]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(run / "checkpoints")
    with pytest.raises(InputError, match=r"no finished model beside .*--config FOLDER"):
        export(tmp_path / "run", tmp_path / "out", to="hf")
    model = tmp_path / "run" / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (model / name).write_text((run / "config" / "config.json").read_text())
    (model / "model.safetensors").write_text("not copied")
    (model / "model.safetensors.index.json").write_text("not copied")
    out = export(tmp_path / "run", tmp_path / "out", to="hf")
    assert sorted(p.name for p in out.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    with pytest.raises(InputError, match=r"no config\.json in the config folder"):
        export(tmp_path / "run", tmp_path / "more", to="hf", config=tmp_path)
    assert not (tmp_path / "more").exists()


def test_the_configuration_of_another_model(llamas, tmp_path):
    run = llamas[1]
    values = json.loads((run / "config" / "config.json").read_text())
    for change, words in [
        ({"hidden_size": 64}, r"embed_tokens\.weight is \[64, 32\] in the checkpoint"),
        ({"num_hidden_layers": 3}, r"layers\.2\..* is not in the checkpoint"),
        ({"num_hidden_layers": 1}, r"layers\.1\..* is no tensor of LlamaForCausalLM"),
        ({"model_type": "nonsense"}, "could not load the configuration"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(InputError, match=words):
            export(run, tmp_path / "out", to="hf", config=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_tied_in_memory_and_in_the_configuration(tmp_path, tied):
    """Tied by hand and not by the configuration: both copies. The other way round: refused."""
    small = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    small |= {"num_key_value_heads": 1, "intermediate_size": 8, "dtype": "float32"}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**small, tie_word_embeddings=False))
    if not tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    with Checkpointer(tmp_path / "checkpoints") as ck:
        ck.attach(model=model)
        ck.save(1).wait()
    LlamaConfig(**small, tie_word_embeddings=tied).save_pretrained(tmp_path / "config")
    if tied:
        with pytest.raises(InputError, match=r"is tied to model\.embed_tokens\.weight, but not"):
            export(tmp_path, tmp_path / "out", to="hf", config=tmp_path / "config")
        return
    out = export(tmp_path, tmp_path / "out", to="hf", config=tmp_path / "config")
    loaded = load_file(out / "model.safetensors")
    assert torch.equal(loaded["lm_head.weight"], loaded["model.embed_tokens.weight"])


def test_no_more_than_a_tensor_is_in_memory(llamas, tmp_path, monkeypatch):
    """A tensor is let go before the next one is read."""
    alive, most = [0], [0]
    read = Reader.read

    class Watched(torch.Tensor):
        def __del__(self):
            alive[0] -= 1

    def watched(self, name):
        tensor = read(self, name).as_subclass(Watched)
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        return tensor

    monkeypatch.setattr(Reader, "read", watched)
    export(llamas[2], tmp_path / "out", to="hf", config=llamas[2] / "config")
    assert 1 <= most[0] <= 2


def entry(dtype, *shape):
    return TensorEntry(dtype, shape, "state", "segment", ())


def test_files_of_a_size():
    entries = {"a": entry("float32", 2), "b": entry("float32", 9), "c": entry("uint8", 3)}
    entries |= {"d": entry("uint8", 5), "e": entry("uint8", 1)}
    assert shards(entries, 8) == [["a"], ["b"], ["c", "d"], ["e"]]
    assert shards(entries, 1000) == [list(entries)]
    assert shards({}, 8) == [[]]


def test_the_configuration_states_the_exported_type():
    entries = {"ids": entry("int64", 1), "w": entry("bfloat16", 2)}
    before = {"torch_dtype": "float32", "use_cache": False, "quantization_config": {}, "x": 1}
    after = {"architectures": ["M"], "dtype": "bfloat16", "use_cache": True, "x": 1}
    assert described(before, "M", entries) == after
    assert described({"architectures": ["N"]}, "M", {}) == {"architectures": ["N"]}
