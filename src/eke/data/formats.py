"""Three shapes of a row, and what each must hold.

- `text`: `text`.
- `prompt`: `prompt` and one of `response`, `completion`, `answer`, `output`; or `instruction`,
  perhaps `input`, and `output` or `response`.
- `chat`: `messages`, a list of `{role, content}`; or ShareGPT's `conversations`, a list of
  `{from, value}`.

A field that is null counts as absent. Where a row fits several, chat goes before prompt, and
prompt before text: data sets that were made for chatting often carry the rendered text too.
Property: `parse_row` gives a sample or raises an `InputError` that names the row's origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from eke.errors import InputError

Format = Literal["text", "prompt", "chat"]
FORMATS: tuple[Format, ...] = get_args(Format)

RESPONSES: tuple[str, ...] = ("response", "completion", "answer", "output")
INSTRUCTION_RESPONSES = ("output", "response")
EXPECTED: dict[str, str] = {
    "text": "'text'",
    "prompt": "'prompt' and one of 'response', 'completion', 'answer', 'output'; or "
    "'instruction' and 'output' or 'response'",
    "chat": "'messages' or 'conversations'",
}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
Message = dict[str, str]
"""`{"role": ..., "content": ...}`."""


@dataclass(frozen=True)
class Sample:
    """A row's training content, and nothing else.

    Attributes:
        format: which of the fields below hold it.
        text: of a text; else empty.
        prompt, response: of a prompt; else empty.
        messages: of a chat, each with role and content; else empty.
    """

    format: Format
    text: str = ""
    prompt: str = ""
    response: str = ""
    messages: tuple[tuple[str, str], ...] = ()

    def chat(self) -> list[Message]:
        """The messages as chat templates take them."""
        return [{"role": role, "content": content} for role, content in self.messages]

    def content(self) -> list[Any]:
        """The sample as JSON values; equal for rows that train the same."""
        return [
            self.format,
            self.text,
            self.prompt,
            self.response,
            [list(turn) for turn in self.messages],
        ]

    def texts(self) -> list[str]:
        """Every piece of text."""
        contents = [content for _, content in self.messages]
        return [text for text in (self.text, self.prompt, self.response, *contents) if text]


def detect_format(row: Mapping[str, Any], origin: str = "a row") -> Format:
    """Which format the fields of `row` make; their values are not looked at.

    Raises:
        InputError: none; it names `origin`, the fields found and the fields expected.
    """
    if _has(row, "messages") or _has(row, "conversations"):
        return "chat"
    if _has(row, "prompt", RESPONSES) or _has(row, "instruction", INSTRUCTION_RESPONSES):
        return "prompt"
    if _has(row, "text"):
        return "text"
    _lacks(row, origin, "; ".join(f"{EXPECTED[f]} ({f})" for f in FORMATS))


def parse_row(row: Mapping[str, Any], format: str = "auto", origin: str = "a row") -> Sample:
    """The sample in `row`.

    Args:
        row: field names to values.
        format: one of `FORMATS`, or `"auto"` for whichever the fields make.
        origin: where the row stands, for the message.

    Raises:
        InputError: the fields are not there, or hold something else than text.
    """
    kind = detect_format(row, origin) if format == "auto" else format
    if kind == "text":
        if not _has(row, "text"):
            _lacks(row, origin, EXPECTED["text"])
        return Sample("text", text=_text(row["text"], "text", origin))
    if kind == "prompt":
        return _prompt(row, origin)
    if kind == "chat":
        return _chat(row, origin)
    raise InputError("no such data format", value=format, rule=f"it is auto, {', '.join(FORMATS)}")


def _prompt(row: Mapping[str, Any], origin: str) -> Sample:
    if _has(row, "prompt", RESPONSES):
        prompt = _text(row["prompt"], "prompt", origin)
        answers = RESPONSES
    elif _has(row, "instruction", INSTRUCTION_RESPONSES):
        prompt = _text(row["instruction"], "instruction", origin)
        answers = INSTRUCTION_RESPONSES
        if row.get("input") not in (None, ""):  # alpaca leaves it empty where there is none
            prompt += "\n\n" + _text(row["input"], "input", origin)
    else:
        _lacks(row, origin, EXPECTED["prompt"])
    field = next(name for name in answers if _has(row, name))
    return Sample("prompt", prompt=prompt, response=_text(row[field], field, origin))


def _chat(row: Mapping[str, Any], origin: str) -> Sample:
    if _has(row, "messages"):
        field, role_key, text_key = "messages", "role", "content"
    elif _has(row, "conversations"):
        field, role_key, text_key = "conversations", "from", "value"
    else:
        _lacks(row, origin, EXPECTED["chat"])
    turns = row[field]
    if not isinstance(turns, list) or not turns:
        raise InputError(
            f"{origin}: {field!r} must be a list of messages, at least one",
            value=_short(turns),
            fix=_MEND,
        )
    messages = []
    for number, turn in enumerate(turns):
        where = f"{field}[{number}]"
        if not isinstance(turn, Mapping):
            raise InputError(
                f"{origin}: {where} must be an object with {role_key!r} and {text_key!r}",
                value=_short(turn),
                fix=_MEND,
            )
        if turn.get("tool_calls"):
            raise InputError(
                f"{origin}: {where} calls tools, which eke does not train on",
                fix="Write the calls into the message's text, or leave the row out",
            )
        role = _text(turn.get(role_key), f"{where}.{role_key}", origin)
        content = _text(turn.get(text_key), f"{where}.{text_key}", origin)
        if field == "conversations":
            if role not in SHAREGPT_ROLES:
                raise InputError(
                    f"{origin}: {where}.{role_key} is no role of a conversation",
                    value=role,
                    rule=f"it is one of {', '.join(SHAREGPT_ROLES)}",
                    fix=_MEND,
                )
            role = SHAREGPT_ROLES[role]
        messages.append((role, content))
    return Sample("chat", messages=tuple(messages))


_MEND = "Mend the row, or leave it out"


def _has(row: Mapping[str, Any], field: str, one_of: tuple[str, ...] = ()) -> bool:
    if row.get(field) is None:
        return False
    return not one_of or any(row.get(name) is not None for name in one_of)


def _lacks(row: Mapping[str, Any], origin: str, expected: str) -> NoReturn:
    found = ", ".join(repr(str(name)) for name, value in row.items() if value is not None)
    raise InputError(
        f"{origin} has not the fields of a training sample: found {found or 'none'}",
        rule=f"expected {expected}",
        fix="Rename the fields, or set [data] format",
    )


def _text(value: object, field: str, origin: str) -> str:
    if not isinstance(value, str):
        raise InputError(
            f"{origin}: {field!r} must be text, and is of type {type(value).__name__}",
            value=_short(value),
            fix=_MEND,
        )
    if not value.strip():
        raise InputError(f"{origin}: {field!r} is empty", fix=_MEND)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: JSON can spell it
        raise InputError(
            f"{origin}: {field!r} holds half a character at position {error.start}",
            rule="text must be valid Unicode",
            fix=_MEND,
        ) from error
    return value


def _short(value: object) -> object:
    text = repr(value)
    return value if len(text) <= 80 else text[:77] + "..."
