"""The finished model loads as it is, and a write that fails leaves the one before."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eke.errors import EkeError
from eke.training.finish import write_model


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture
def model(model_dir: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.config.use_cache = False  # as it is while it trains
    return model


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def assert_holds(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = bits(AutoModelForCausalLM.from_pretrained(path))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_transformers_loads_it(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    write_model(model, tokenizer, tmp_path / "model")
    assert_holds(tmp_path / "model", bits(model))
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "What does it do?\n"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert names(tmp_path) == ["model"]


def test_it_generates_with_a_cache_and_trains_on_without(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    write_model(model, tokenizer, tmp_path / "model")
    assert model.config.use_cache is False
    finished = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert finished.config.use_cache is True
    assert finished.generation_config.use_cache is True


def test_it_replaces_the_one_before(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    write_model(model, tokenizer, tmp_path / "model")
    (tmp_path / "model" / "stale.txt").write_text("of the last run")
    with torch.no_grad():
        model.lm_head.weight += 1
    write_model(model, tokenizer, tmp_path / "model")
    assert_holds(tmp_path / "model", bits(model))
    assert not (tmp_path / "model" / "stale.txt").exists()
    assert names(tmp_path) == ["model"]


def failing(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["weights", "tokenizer", "sync", "exchange"])
def test_a_failure_leaves_the_one_before(
    tmp_path: Path, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    write_model(model, tokenizer, tmp_path / "model")
    before = bits(model)
    with torch.no_grad():
        model.lm_head.weight += 1
    rename = Path.rename

    def fail_the_second(self: Path, target: Path) -> Path:
        if self.name == ".model.tmp":
            raise FULL
        return rename(self, target)

    with monkeypatch.context() as patch:
        if where == "weights":
            patch.setattr(model, "save_pretrained", failing(FULL))
        elif where == "tokenizer":
            # tokenizers reports a full disk like this.
            patch.setattr(type(tokenizer), "save_pretrained", failing(Exception("No space left")))
        elif where == "sync":
            patch.setattr("eke.training.finish.os.fsync", failing(FULL))
        else:
            patch.setattr(Path, "rename", fail_the_second)
        with pytest.raises(EkeError, match=r"could not write the finished model.*No space left"):
            write_model(model, tokenizer, tmp_path / "model")
    assert model.config.use_cache is False
    assert_holds(tmp_path / "model", before)
    assert names(tmp_path) == ["model"]
    write_model(model, tokenizer, tmp_path / "model")
    assert_holds(tmp_path / "model", bits(model))


def test_a_failure_where_nothing_was_leaves_nothing(
    tmp_path: Path, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "save_pretrained", failing(FULL))
    with pytest.raises(EkeError):
        write_model(model, tokenizer, tmp_path / "model")
    assert names(tmp_path) == []


WRITER = textwrap.dedent(
    """
    import resource, signal, sys
    from pathlib import Path
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from eke.errors import EkeError
    from eke.training import finish

    source, target, mode = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if mode == "full":  # a file may not grow further, as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    else:
        exchange = finish._exchange

        def killed(*paths):
            print("written", flush=True)
            signal.raise_signal(signal.SIGKILL)

        finish._exchange = killed
    try:
        finish.write_model(model, tokenizer, Path(target))
    except EkeError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
    """
)


@pytest.mark.parametrize("mode", ["full", "killed"])
def test_a_full_disk_and_a_kill_in_a_real_process(
    tmp_path: Path, model_dir: Path, model: Any, tokenizer: Any, start_python: Any, mode: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    write_model(model, tokenizer, place / "model")
    (tmp_path / "writer.py").write_text(WRITER)
    done = start_python(tmp_path / "writer.py", model_dir, place / "model", mode)
    out, err = done.communicate(timeout=100)
    if mode == "full":
        assert done.returncode == 1, err
        assert "could not write the finished model" in out
        assert "File too large" in out
        assert names(place) == ["model"]
    else:
        assert (done.returncode, out) == (-9, "written\n"), err
    assert_holds(place / "model", bits(model))
    write_model(model, tokenizer, place / "model")  # what a kill left behind is cleared away
    assert names(place) == ["model"]


def test_a_write_that_was_cut_short_is_no_obstacle(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    for leftover in (".model.tmp", ".model.old"):
        write_model(model, tokenizer, tmp_path / "model")
        shutil.copytree(tmp_path / "model", tmp_path / leftover)
    write_model(model, tokenizer, tmp_path / "model")
    assert names(tmp_path) == ["model"]
