from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.data import detect_format
from eke.data.formats import FORMATS, parse_row
from eke.errors import InputError

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
GOOD: list[tuple[dict[str, Any], str, Any]] = [
    ({"text": "t"}, "text", "t"),
    ({"prompt": "p", "response": "r"}, "prompt", ("p", "r")),
    ({"prompt": "p", "completion": "r"}, "prompt", ("p", "r")),
    ({"prompt": "p", "answer": "r"}, "prompt", ("p", "r")),
    ({"prompt": "p", "output": "r"}, "prompt", ("p", "r")),
    ({"prompt": "p", "response": None, "answer": "r"}, "prompt", ("p", "r")),
    ({"instruction": "p", "output": "r"}, "prompt", ("p", "r")),
    ({"instruction": "p", "input": "", "response": "r"}, "prompt", ("p", "r")),
    ({"instruction": "p", "input": None, "output": "r"}, "prompt", ("p", "r")),
    ({"instruction": "p", "input": "i", "output": "r", "text": "t"}, "prompt", ("p\n\ni", "r")),
    ({"messages": CHAT, "prompt": "p", "text": "t"}, "chat", CHAT),
    ({"conversations": SHAREGPT}, "chat", CHAT),
    ({"prompt": "p", "text": "t"}, "text", "t"),
    ({"messages": None, "text": "t"}, "text", "t"),
]


@pytest.mark.parametrize(("row", "format", "content"), GOOD)
def test_good_rows(row: dict[str, Any], format: str, content: Any) -> None:
    assert detect_format(row) == format
    sample = parse_row(row)
    assert sample == parse_row(row, format)
    assert sample.format == format
    got = {"text": sample.text, "prompt": (sample.prompt, sample.response), "chat": sample.chat()}
    assert got[format] == content
    assert sample.texts() == {"text": ["t"], "prompt": [*content], "chat": ["q", "a"]}[format]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "auto", "found none; expected"),
    ({"txt": "x", "id": 3}, "auto", "found 'txt', 'id'; expected 'text' (text); 'prompt' and one"),
    ({"prompt": "p"}, "auto", "found 'prompt'; expected"),
    ({"text": "t"}, "prompt", "found 'text'; expected 'prompt' and one of"),
    ({"text": "t"}, "chat", "found 'text'; expected 'messages'"),
    ({"prompt": "p", "response": "r"}, "text", "expected 'text'"),
    ({"text": ""}, "auto", "'text' is empty"),
    ({"text": " \n"}, "auto", "'text' is empty"),
    ({"text": 3}, "auto", "'text' must be text, and is of type int; got 3"),
    ({"text": "a\ud800"}, "auto", "'text' holds half a character at position 1"),
    ({"prompt": CHAT, "response": "r"}, "auto", "'prompt' must be text, and is of type list"),
    ({"prompt": "p", "response": ""}, "auto", "'response' is empty"),
    ({"instruction": "p", "input": 3, "output": "r"}, "auto", "'input' must be text"),
    ({"messages": []}, "auto", "'messages' must be a list of messages, at least one"),
    ({"messages": "hello"}, "auto", "'messages' must be a list"),
    ({"messages": ["hello"]}, "auto", "messages[0] must be an object with 'role' and 'content'"),
    ({"messages": [*CHAT, {"role": "user"}]}, "auto", "'messages[2].content' must be text"),
    ({"messages": [{"role": "", "content": "x"}]}, "auto", "'messages[0].role' is empty"),
    ({"messages": [{"role": "user", "content": ""}]}, "auto", "'messages[0].content' is empty"),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
        "auto",
        "messages[0] calls tools",
    ),
    ({"conversations": [{"from": "bing", "value": "x"}]}, "auto", "got 'bing'; it is one of human"),
    ({"conversations": CHAT}, "auto", "'conversations[0].from' must be text"),
    ({"text": "t"}, "poem", "no such data format; got 'poem'"),
]


@pytest.mark.parametrize(("row", "format", "says"), BAD)
def test_bad_rows(row: dict[str, Any], format: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        parse_row(row, format, "data.jsonl:17")
    assert says in str(error.value)
    assert "data.jsonl:17" in str(error.value) or format == "poem"


fields = st.sampled_from(
    ["text", "prompt", "response", "output", "instruction", "input", "messages", "conversations"]
)
values = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.sampled_from(["user", "gpt", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value"]), inner)
    ),
    max_leaves=8,
)


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(row=st.dictionaries(fields, values), format=st.sampled_from(["auto", *FORMATS]))
def test_a_sample_or_one_clear_error(row: dict[str, Any], format: str) -> None:
    try:
        sample = parse_row(row, format, "here.jsonl:1")
    except InputError as error:
        if "here.jsonl:1" not in str(error):
            raise
    else:
        assert format in ("auto", sample.format)
        assert sample.texts()
        assert all(text.strip() for text in sample.texts())
