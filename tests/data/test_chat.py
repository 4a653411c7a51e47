from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.data.chat import ChatEncoder, before_trailing_blanks, token_ranges
from eke.errors import InputError

CHATS: dict[str, list[dict[str, str]]] = {
    "one turn": [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4."},
    ],
    "system and two turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, what can I do? 🎵"},
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "\n  assistant\n\ncode()\n"},
    ],
    "ends with the user": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    "two answers in a row": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b one"},
        {"role": "assistant", "content": "b two"},
    ],
    "begins with the assistant": [
        {"role": "assistant", "content": "Good day"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Bye"},
    ],
}
CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
CHATML_GENERATION = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
NO_GENERATION_PROMPT = CHATML.split("{% if add_generation_prompt")[0]
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('no system here') }}{% endif %}{% endfor %}"
)
FORGETFUL = (  # leaves the thinking out of all turns but the last, as Qwen3's does
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def with_template(tokenizer: Any, template: str | None) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def spoken(encoder: ChatEncoder, messages: list[dict[str, str]]) -> list[str]:
    """The text of each run of supervised tokens."""
    ids, marks = encoder.encode(messages, "x.jsonl:1")
    assert len(ids) == len(marks)
    runs: list[list[int]] = []
    for k, (token, mark) in enumerate(zip(ids, marks, strict=True)):
        if mark and (k == 0 or not marks[k - 1]):
            runs.append([])
        if mark:
            runs[-1].append(token)
    return [encoder.tokenizer.decode(run) for run in runs]


def said(messages: list[dict[str, str]], end: str) -> list[str]:
    return [m["content"] + end for m in messages if m["role"] == "assistant"]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("template", [CHATML, CHATML_GENERATION, NO_GENERATION_PROMPT])
def test_chatml_supervises_what_the_assistant_says_and_the_end_token(
    tokenizer: Any, template: str, name: str
) -> None:
    changed = with_template(tokenizer, template)
    encoder = ChatEncoder(changed)
    assert encoder.has_generation_tags == (template == CHATML_GENERATION)
    expected = changed.apply_chat_template(CHATS[name], tokenize=True, return_dict=True)
    assert encoder.encode(CHATS[name], "x")[0] == list(expected["input_ids"])
    assert spoken(encoder, CHATS[name]) == said(CHATS[name], "<|end|>")


@pytest.mark.parametrize("name", [n for n in CHATS if n != "begins with the assistant"])
def test_smollm2(smollm2: Any, name: str) -> None:
    encoder = ChatEncoder(smollm2)
    expected = smollm2.apply_chat_template(CHATS[name], tokenize=True, return_dict=True)
    assert encoder.encode(CHATS[name], "x")[0] == list(expected["input_ids"])
    # Its "\n\n" token holds the header's line break and the first one of an answer.
    heard = [text.lstrip("\n") for text in spoken(encoder, CHATS[name])]
    assert heard == [text.lstrip("\n") for text in said(CHATS[name], "<|im_end|>")]


def test_tags_and_prefixes_agree(smollm2: Any) -> None:
    """The same marks, whether the template gives them or they are worked out."""
    plain: str = smollm2.chat_template
    body = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    assert body in plain
    tagged = plain.replace(
        body,
        "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{message['content'] + '<|im_end|>'}}{% endgeneration %}{% else %}"
        "{{message['content'] + '<|im_end|>'}}{% endif %}{{'\n'}}",
    )
    tags = ChatEncoder(with_template(smollm2, tagged))
    assert tags.has_generation_tags
    for messages in CHATS.values():
        assert tags.encode(messages, "x") == ChatEncoder(smollm2).encode(messages, "x")


def test_a_template_that_has_no_headers(tokenizer: Any) -> None:
    encoder = ChatEncoder(with_template(tokenizer, LLAMA2))
    messages = [*CHATS["one turn"], *CHATS["one turn"]]
    assert [text.strip() for text in spoken(encoder, messages)] == said(messages, "<|end|>")
    with pytest.raises(InputError, match=r"x\.jsonl:1: .* refuses this chat: no system here"):
        encoder.encode(CHATS["system and two turns"], "x.jsonl:1")


def test_the_default_template(tokenizer: Any) -> None:
    encoder = ChatEncoder(with_template(tokenizer, None), prefix=(7,))
    messages = CHATS["system and two turns"]
    assert spoken(encoder, messages) == said(messages, "<|end|>")
    ids, marks = encoder.encode(messages, "x")
    assert (ids[0], marks[0]) == (7, False)
    assert tokenizer.decode(ids[1:]).startswith("### System:\nBe brief.\n\n### User:\nHi\n\n###")
    assert ChatEncoder(tokenizer, prefix=(7,)).encode(messages, "x")[0][0] != 7


def test_white_space_that_ends_a_turn_by_itself_is_supervised(tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    encoder = ChatEncoder(with_template(tokenizer, template))
    assert [t.lstrip() for t in spoken(encoder, CHATS["one turn"])] == ["It is 4.\n"]


def test_a_template_that_changes_its_mind_is_refused_unless_it_has_one_answer(
    tokenizer: Any,
) -> None:
    encoder = ChatEncoder(with_template(tokenizer, FORGETFUL))
    assert spoken(encoder, CHATS["one turn"]) == ["<think></think>It is 4.<|end|>"]
    with pytest.raises(InputError, match=r"x\.jsonl:4: .* renders message 2 differently"):
        encoder.encode(CHATS["system and two turns"], "x.jsonl:4")


def test_tags_in_a_branch_not_taken_fall_back(tokenizer: Any) -> None:
    template = "{% if tools %}{% generation %}x{% endgeneration %}{% endif %}" + CHATML
    encoder = ChatEncoder(with_template(tokenizer, template))
    assert encoder.has_generation_tags
    assert spoken(encoder, CHATS["one turn"]) == ["It is 4.<|end|>"]


def test_no_assistant_means_no_supervision(tokenizer: Any) -> None:
    for template in (CHATML, CHATML_GENERATION):
        encoder = ChatEncoder(with_template(tokenizer, template))
        assert not any(encoder.encode(CHATS["one turn"][:1], "x")[1])


def test_tokenizers_that_cannot_serve(tokenizer: Any) -> None:
    several = with_template(tokenizer, None)
    several.chat_template = {"tools": CHATML, "rag": CHATML}
    with pytest.raises(InputError, match="chat template cannot be used"):
        ChatEncoder(several)

    class Slow:
        is_fast = False

    with pytest.raises(InputError, match="need a fast tokenizer"):
        ChatEncoder(Slow())


lengths = st.lists(st.integers(0, 4), max_size=12)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tokens=lengths, pieces=lengths)
def test_token_ranges_equal_brute_force(tokens: list[int], pieces: list[int]) -> None:
    def cut(sizes: list[int]) -> list[tuple[int, int]]:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    offsets, spans = cut(tokens), cut(pieces)[::2]
    expected = []
    for begin, stop in spans:
        characters = set(range(begin, stop))
        hit = [k for k, (start, end) in enumerate(offsets) if characters & set(range(start, end))]
        if hit:
            expected.append((hit[0], hit[-1] + 1))
    assert token_ranges(offsets, spans) == expected


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [("aE_", 2), ("aE__", 2), ("a__", 3), ("aE", 2), ("a_E_", 3), ("__", 2), ("", 0), ("aEb_", 4)],
)
def test_before_trailing_blanks(tokens: str, kept: int) -> None:
    blank, special = [t == "_" for t in tokens], [t == "E" for t in tokens]
    assert before_trailing_blanks(0, len(tokens), blank, special) == kept
