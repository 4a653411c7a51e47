from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.data import bpe, builtin_tokenizer, open_source
from eke.data.bpe import MIN_VOCAB, ROLES
from eke.errors import InputError, MissingExtraError

TEXTS = [{"text": f"the {word} of the {word}s is in the house"} for word in ("cat", "dog", "bird")]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < len(tokenizer) for token in ids)


def test_special_tokens(tokenizer: Any) -> None:
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert [tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ROLES] == [2, 3, 4]
    assert tokenizer.bos_token is None
    assert tokenizer.unk_token is None
    hello = tokenizer("hello")["input_ids"]
    assert tokenizer("<|user|>hello<|end|>")["input_ids"] == [3, *hello, 1]
    assert tokenizer.decode([3, *hello, 1], skip_special_tokens=True) == "hello"


def test_words_of_the_data_become_tokens(write_jsonl: Any, tmp_path: Path) -> None:
    tokenizer = builtin_tokenizer(open_source(str(write_jsonl(TEXTS))), 300, tmp_path)
    assert len(tokenizer) <= 300
    assert "Ġthe" in tokenizer.get_vocab()
    assert len(tokenizer(" the house")["input_ids"]) < len(" the house") / 2


def test_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n"
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(asked)
    import jinja2

    with pytest.raises(jinja2.TemplateError, match="must be system, user or assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_a_saved_tokenizer_loads_with_auto_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    text = "Return  the sum, 数学 🎵 <|end|>\n"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token_id, loaded.pad_token_id) == (1, 0)
    assert len(loaded) == len(tokenizer)


def test_same_texts_same_bytes_in_another_process(write_jsonl: Any, tmp_path: Path) -> None:
    path = write_jsonl(TEXTS)
    builtin_tokenizer(open_source(str(path)), 320, tmp_path / "here")
    program = (
        "from eke.data import builtin_tokenizer, open_source\n"
        f"builtin_tokenizer(open_source({str(path)!r}), 320, {str(tmp_path / 'there')!r})\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    (here,), (there,) = (tmp_path / "here").iterdir(), (tmp_path / "there").iterdir()
    assert here.name == there.name
    assert here.read_bytes() == there.read_bytes()


def test_the_cache(write_jsonl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(write_jsonl(TEXTS)))
    cache = tmp_path / "cache"
    first = builtin_tokenizer(source, 300, cache)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert builtin_tokenizer(source, 300, cache).get_vocab() == first.get_vocab()
    assert path.read_bytes() == whole
    builtin_tokenizer(source, 310, cache)
    other = open_source(str(write_jsonl(TEXTS[:2], "other.jsonl")))
    builtin_tokenizer(other, 300, cache)
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr(bpe, "train_bpe", lambda *_: pytest.fail("trained again"))
    assert builtin_tokenizer(source, 300, cache).get_vocab() == first.get_vocab()


def test_large_sources_are_sampled(
    write_jsonl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(write_jsonl([{"text": f"row {i}"} for i in range(100)])))
    monkeypatch.setattr(bpe, "MAX_ROWS", 10)
    assert list(bpe._texts(source)) == [f"row {i}" for i in range(0, 100, 10)]
    monkeypatch.setattr(bpe, "MAX_CHARS", 12)
    assert list(bpe._texts(source)) == ["row 0", "row 10", "row 20"]


def test_all_formats_are_learned_from(write_jsonl: Any) -> None:
    rows = [
        {"prompt": "p q", "response": "r s"},
        {"messages": [{"role": "user", "content": "t"}]},
    ]
    assert list(bpe._texts(open_source(str(write_jsonl(rows))))) == ["p q", "r s", "t"]


def test_a_vocabulary_without_room(write_jsonl: Any, tmp_path: Path) -> None:
    source = open_source(str(write_jsonl(TEXTS)))
    with pytest.raises(InputError, match=f"need {MIN_VOCAB}"):
        builtin_tokenizer(source, MIN_VOCAB - 1, tmp_path)
    smallest = builtin_tokenizer(source, MIN_VOCAB, tmp_path)
    assert len(smallest) == MIN_VOCAB
    assert smallest.decode(smallest("é🎵")["input_ids"]) == "é🎵"


def test_without_tokenizers(
    write_jsonl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(write_jsonl(TEXTS)))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match="the built-in tokenizer needs"):
        builtin_tokenizer(source, 300, tmp_path)
