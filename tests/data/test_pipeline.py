from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from eke.data import TokenizedDataset, check_rows, open_source, split_by_content
from eke.data.pipeline import IGNORED, joined_prompt
from eke.errors import InputError

CHAT = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello!"}]
ROWS: list[dict[str, Any]] = [
    {"text": "Return the sum of the values."},
    {"prompt": "What is it?", "response": "It is a number, 数学 🎵."},
    {"messages": CHAT},
    {"instruction": "Add.", "input": "1 2", "output": "3"},
]


@pytest.fixture
def make(write_jsonl: Any, tokenizer: Any) -> Any:
    def build(rows: list[Any] | None = None, **options: Any) -> TokenizedDataset:
        source = open_source(str(write_jsonl(ROWS if rows is None else rows)))
        return TokenizedDataset(source, None, tokenizer, **{"max_length": 500, **options})

    return build


def learned(item: Any, tokenizer: Any) -> str:
    labels = item["labels"]
    assert torch.equal(labels[labels != IGNORED], item["input_ids"][labels != IGNORED])
    text: str = tokenizer.decode(labels[labels != IGNORED])
    return text


def test_what_each_format_becomes(make: Any, tokenizer: Any) -> None:
    dataset = make()
    whole = [tokenizer.decode(item["input_ids"]) for item in map(dataset.__getitem__, range(4))]
    assert whole == [
        "Return the sum of the values.<|end|>",
        "What is it?\nIt is a number, 数学 🎵.<|end|>",
        "<|user|>\nHi there<|end|>\n<|assistant|>\nHello!<|end|>\n",
        "Add.\n\n1 2\n3<|end|>",
    ]
    assert [learned(dataset[k], tokenizer) for k in range(4)] == [
        "Return the sum of the values.<|end|>",
        "It is a number, 数学 🎵.<|end|>",
        "Hello!<|end|>",
        "3<|end|>",
    ]
    for k in range(4):
        item = dataset[k]
        assert set(item) == {"input_ids", "labels", "index", "cut_tokens"}
        assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
        assert item["input_ids"].shape == item["labels"].shape
        assert (item["index"], item["cut_tokens"]) == (k, 0)


def test_prompt_tokens_are_those_of_the_prompt_alone(make: Any, tokenizer: Any) -> None:
    """What the model sees when it is asked is a prefix of what it was trained on."""
    item = make()[1]
    asked = tokenizer(joined_prompt("What is it?"))["input_ids"]
    assert item["input_ids"][: len(asked)].tolist() == asked
    assert item["labels"][: len(asked)].eq(IGNORED).all()
    assert item["labels"][len(asked) :].ne(IGNORED).all()


@pytest.mark.parametrize(
    ("prompt", "response", "joined"),
    [("a", "b", "a\n"), ("a ", "b", "a "), ("a", " b", "a"), ("a\n\n", "b", "a\n\n")],
)
def test_joined_prompt(prompt: str, response: str, joined: str) -> None:
    assert joined_prompt(prompt, response) == joined


def test_smollm2_chat_and_text(smollm2: Any, write_jsonl: Any) -> None:
    source = open_source(str(write_jsonl(ROWS)))
    dataset = TokenizedDataset(source, [2, 0], smollm2, max_length=200)
    chat, text = dataset[0], dataset[1]
    assert (chat["index"], text["index"]) == (2, 0)
    expected = smollm2.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert chat["input_ids"].tolist() == list(expected)
    assert learned(chat, smollm2) == "Hello!<|im_end|>"
    assert text["input_ids"].tolist() == [*smollm2(ROWS[0]["text"])["input_ids"], 2]
    assert text["input_ids"].equal(text["labels"])


def test_a_begin_token_goes_first_where_the_tokenizer_wants_one(
    write_jsonl: Any, tokenizer: Any
) -> None:
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>"])
    begin = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    llama_like = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|end|>"
    )
    assert llama_like("x")["input_ids"][0] == begin
    source = open_source(str(write_jsonl(ROWS)))
    dataset = TokenizedDataset(source, None, llama_like, max_length=500)
    for k in range(4):  # the chat goes by the default template: this tokenizer has none
        ids, labels = dataset[k]["input_ids"].tolist(), dataset[k]["labels"].tolist()
        assert ids.count(begin) == 1
        assert ids[0] == begin
        assert (labels[0] == IGNORED) == (k != 0)


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(
    prompt=st.text(st.characters(codec="utf-8"), min_size=1, max_size=30),
    response=st.text(st.characters(codec="utf-8"), min_size=1, max_size=30),
    max_length=st.integers(2, 40),
)
def test_overlength(make: Any, prompt: str, response: str, max_length: int) -> None:
    rows = [{"prompt": "p" + prompt, "response": "r" + response}]
    whole = make(rows, overlength="solo", max_length=max_length)[0]
    size = len(whole["input_ids"])
    assert whole["cut_tokens"] == 0
    cut = make(rows, overlength="truncate", max_length=max_length)[0]
    kept = min(size, max_length)
    assert cut["cut_tokens"] == size - kept
    assert cut["input_ids"].equal(whole["input_ids"][:kept])
    assert cut["labels"].equal(whole["labels"][:kept])
    skipped = make(rows, overlength="skip", max_length=max_length)[0]
    strict = make(rows, overlength="error", max_length=max_length)
    if size <= max_length:
        assert skipped["input_ids"].equal(whole["input_ids"])
        assert strict[0]["labels"].equal(whole["labels"])
    else:
        assert skipped["input_ids"].shape == skipped["labels"].shape == (0,)
        assert skipped["input_ids"].dtype == torch.int64
        assert skipped["cut_tokens"] == size
        with pytest.raises(InputError) as error:
            strict[0]
        says = f"rows.jsonl:1 has {size:,} tokens; [data] max_length is {max_length:,}. Raise"
        assert says in str(error.value)


def test_a_cut_sample_without_labels_has_no_weight(make: Any) -> None:
    rows = [{"prompt": "many words " * 30, "response": "short"}]
    item = make(rows, overlength="truncate", max_length=10)[0]
    assert len(item["input_ids"]) == 10
    assert item["labels"].eq(IGNORED).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"overlength": "shrink"},
            "got 'shrink'; overlength is one of error, truncate, skip, solo",
        ),
        ({"format": "poem"}, "no such data format; got 'poem'; it is auto, text"),
        ({"max_length": 1}, "max_length is too small; got 1"),
    ],
)
def test_settings_that_are_refused(make: Any, options: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        make(**options)
    assert says in str(error.value)


def test_indices_and_end_token_are_checked(write_jsonl: Any, tokenizer: Any) -> None:
    source = open_source(str(write_jsonl(ROWS)))
    with pytest.raises(InputError, match="the source has rows 0 to 3"):
        TokenizedDataset(source, [0, 4], tokenizer, max_length=9)
    assert len(TokenizedDataset(source, [], tokenizer, max_length=9)) == 0
    dataset = TokenizedDataset(source, [3, 3], tokenizer, max_length=99)
    assert dataset[1]["index"] == 3
    for k in (-1, 2):
        with pytest.raises(IndexError):
            dataset[k]
    endless = pickle.loads(pickle.dumps(tokenizer))  # noqa: S301 (our own bytes)
    endless.eos_token = None
    with pytest.raises(InputError, match="no end-of-sequence token"):
        TokenizedDataset(source, None, endless, max_length=9)


def test_a_bad_row_is_named_by_file_and_line(make: Any) -> None:
    dataset = make([{"text": "good"}, {"txet": "bad"}])
    assert len(dataset[0]["input_ids"]) > 1
    with pytest.raises(InputError, match=r"rows\.jsonl:2 has not the fields .* found 'txet'"):
        dataset[1]
    with pytest.raises(InputError, match=r"rows\.jsonl:1 .* expected 'messages'"):
        make([{"text": "good"}], format="chat")[0]


def test_check_rows_finds_the_first_bad_row_and_hashes_content(write_jsonl: Any) -> None:
    rows = [{"id": i, **ROWS[i % 4]} for i in range(12)]
    hashes = check_rows(open_source(str(write_jsonl(rows))))
    assert hashes == hashes[:4] * 3
    assert len(set(hashes)) == 4
    train, held_out = split_by_content(hashes, 0.5)
    assert {i % 4 for i in train}.isdisjoint(i % 4 for i in held_out)
    bad = open_source(str(write_jsonl([*rows, {"text": ""}], "bad.jsonl")))
    with pytest.raises(InputError, match=r"bad\.jsonl:13: 'text' is empty"):
        check_rows(bad)
    with pytest.raises(InputError, match="no such data format"):
        check_rows(bad, "poem")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_loader_workers_give_the_same_items(make: Any, method: str) -> None:
    dataset = make(ROWS * 8)
    here = [dataset[k] for k in range(len(dataset))]  # file open, template compiled: then fork
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context=method, timeout=100
    )
    there = list(loader)
    assert [item["index"] for item in there] == list(range(32))
    for a, b in zip(here, there, strict=True):
        assert a["input_ids"].equal(b["input_ids"])
        assert a["labels"].equal(b["labels"])


def test_an_error_in_a_worker_keeps_its_class_and_place(make: Any) -> None:
    loader = DataLoader(make([{"txet": "bad"}]), batch_size=None, num_workers=1, timeout=100)
    with pytest.raises(InputError, match=r"rows\.jsonl:1 has not the fields"):
        list(loader)
    gc.collect()  # torch ends the worker when its iterator goes, and the error held on to it


def test_workers_do_not_compete_for_cores(make: Any, write_jsonl: Any, tmp_path: Path) -> None:
    """Nor does a fork after the tokenizer has run in parallel print a warning for each worker."""
    path = write_jsonl(ROWS * 50)
    program = (
        "from torch.utils.data import DataLoader\n"
        "from eke.data import TokenizedDataset, builtin_tokenizer, open_source\n"
        f"source = open_source({str(path)!r})\n"
        f"tokenizer = builtin_tokenizer(source, 300, {str(tmp_path)!r})\n"
        "dataset = TokenizedDataset(source, None, tokenizer, max_length=500)\n"
        "loader = DataLoader(dataset, batch_size=None, num_workers=2, timeout=100,\n"
        "                    multiprocessing_context='fork')\n"
        "import os\n"
        "print(sum(1 for _ in loader), os.environ['TOKENIZERS_PARALLELISM'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    out = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=100,
    )
    assert out.stdout.strip() == "200 false"
    assert "fork" not in out.stderr


def test_too_long_a_sample_is_met_at_the_start_and_short_rows_cost_nothing(make: Any) -> None:
    short, long = {"text": "a b"}, {"text": "word " * 300}
    dataset = make([short] * 20 + [long] + [short] * 20, max_length=200)
    with pytest.raises(InputError, match=r":21 has"):
        dataset.check_lengths()
    assert make([short] * 20, max_length=200).check_lengths() == 0
    assert make([long] * 5, max_length=2000).check_lengths() == 0
    assert make([long] * 5, max_length=1550).check_lengths() == 5
    assert make([long] * 5, max_length=1550).check_lengths(most=3) == 3
    for policy in ("truncate", "skip", "solo"):
        assert make([long], max_length=200, overlength=policy).check_lengths() == 0


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(max_size=80), st.integers(2, 400))
def test_no_row_that_is_passed_over_is_too_long(make: Any, words: str, max_length: int) -> None:
    rows = [
        {"text": words + "."},
        {"prompt": words + "?", "response": words + "."},
        {
            "messages": [
                {"role": "user", "content": words + "?"},
                {"role": "assistant", "content": words + "."},
            ]
        },
    ]
    lengths = [len(item["input_ids"]) for item in map(make(rows).__getitem__, range(3))]
    for row, length in zip(rows, lengths, strict=True):
        dataset = make([row], max_length=max_length)
        if length > max_length:
            with pytest.raises(InputError):
                dataset.check_lengths()
        else:
            dataset.check_lengths()
