"""Chats to token ids, and which of them the assistant said.

Properties, each tested: the ids are those of `tokenizer.apply_chat_template(messages)`; a token
is supervised exactly when it overlaps an assistant turn's own text or its end-of-turn token,
never a role header, another role's turn, or the line break after the end of a turn. (A token
that holds the last character of a header and the first of an answer overlaps the answer.)

Where the template marks the assistant's text with `{% generation %}`, the marks decide. Where
it does not, the chat is rendered up to each assistant turn (with the generation prompt) and up
to its end: what the second adds to the first is what the model has to say. That needs a
template for which a chat's beginning renders to the beginning of the chat; one for which it
does not (some leave the thinking out of earlier turns) is refused.
"""

from __future__ import annotations

import re
from typing import Any

from eke.data.extras import require
from eke.data.formats import Message
from eke.errors import InputError

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + ':\\n' + message['content'] + "
    "(eos_token if message['role'] == 'assistant' else '') + '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}"
)
"""For tokenizers without a chat template: a `### Role:` line, the content, an empty line; the
end-of-sequence token after each of the assistant's turns."""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


class ChatEncoder:
    """Encodes chats with one tokenizer. Picklable, like the tokenizer itself.

    Args:
        tokenizer: a fast tokenizer (one that tells the characters of each token).
        prefix: ids to put before a chat in the default template, such as a begin token.

    Raises:
        InputError: the tokenizer is slow, or has several templates and no default.
    """

    def __init__(self, tokenizer: Any, prefix: tuple[int, ...] = ()) -> None:
        if not tokenizer.is_fast:
            raise InputError(
                "chats need a fast tokenizer, which knows the characters of each token",
                value=type(tokenizer).__name__,
                fix="Load the tokenizer with use_fast=True, or give the data as prompts",
            )
        self.tokenizer = tokenizer
        self.template: str = DEFAULT_TEMPLATE
        self.prefix: tuple[int, ...] = prefix
        if tokenizer.chat_template is not None:
            try:
                self.template = tokenizer.get_chat_template()
            except ValueError as error:
                raise InputError(
                    f"the tokenizer's chat template cannot be used: {error}",
                    fix="Set tokenizer.chat_template to one template",
                ) from error
            self.prefix = ()
        self.has_generation_tags = bool(_GENERATION_TAG.search(self.template))
        added = tokenizer.added_tokens_decoder
        self._special = frozenset(tokenizer.all_special_ids).union(
            id for id, token in added.items() if token.special
        )

    def encode(self, messages: list[Message], origin: str) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether it is supervised.

        Raises:
            InputError: the template refuses the chat, or does not show what the assistant said.
        """
        if self.has_generation_tags:
            encoded = self._apply(
                messages, origin, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            marks = [bool(mark) for mark in encoded["assistant_masks"]]
            # Tags in a branch that this chat does not take mark nothing: look for ourselves.
            if any(marks) or all(message["role"] != "assistant" for message in messages):
                return self._with_prefix(list(encoded["input_ids"]), marks)
        text = self._render(messages, origin)
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        ranges = token_ranges(offsets, self._spans(messages, text, origin))
        blank = [not text[start:end].strip() for start, end in offsets]
        special = [token in self._special for token in ids]
        marks = [False] * len(ids)
        for first, last in ranges:
            last = before_trailing_blanks(first, last, blank, special)
            marks[first:last] = [True] * (last - first)
        return self._with_prefix(ids, marks)

    def _with_prefix(self, ids: list[int], marks: list[bool]) -> tuple[list[int], list[bool]]:
        return [*self.prefix, *ids], [False] * len(self.prefix) + marks

    def _apply(self, messages: list[Message], origin: str, **options: Any) -> Any:
        jinja2 = require("jinja2", "chat templates")
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, **options
            )
        except jinja2.TemplateError as error:
            raise InputError(
                f"{origin}: the tokenizer's chat template refuses this chat: {error}",
                value=[message["role"] for message in messages],
                fix="Mend the order of roles, or leave the row out",
            ) from error

    def _render(self, messages: list[Message], origin: str, prompt: bool = False) -> str:
        text: str = self._apply(messages, origin, tokenize=False, add_generation_prompt=prompt)
        return text

    def _spans(self, messages: list[Message], text: str, origin: str) -> list[Span]:
        """The characters of each assistant turn in the rendered chat `text`."""
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:i], origin) if i else ""
            opened = self._render(messages[:i], origin, prompt=True) if i else ""
            after = self._render(messages[: i + 1], origin)
            if not (after.startswith(opened) and text.startswith(after)):
                raise InputError(
                    f"{origin}: the chat template renders message {i} differently when the chat "
                    "ends there, so what the assistant said cannot be told from the rest",
                    fix="Use a template that marks the assistant's text with {% generation %}, or "
                    "give each row one assistant message, the last",
                )
            start = len(opened)
            if opened == before:
                start = self._content_start(messages[:i], after, start, origin)
            spans.append((start, len(after)))
        return spans

    def _content_start(self, before: list[Message], after: str, start: int, origin: str) -> int:
        """Where the header of the turn that begins at `start` ends, found with a stand-in."""
        stand_in = "\u2058eke\u2058"
        rendered = self._render([*before, {"role": "assistant", "content": stand_in}], origin)
        header = rendered[: max(rendered.find(stand_in), 0)]
        return max(len(header), start) if after.startswith(header) else start


def token_ranges(offsets: list[Span], spans: list[Span]) -> list[Span]:
    """For each span of characters, the tokens [first, last) that overlap it.

    Args:
        offsets: each token's characters [start, end), in order; empty for tokens without any.
        spans: disjoint stretches of characters, in order.
    """
    ranges, k, n = [], 0, len(offsets)
    for begin, stop in spans:
        while k < n and offsets[k][1] <= begin:
            k += 1
        hit = []
        j = k
        while j < n and offsets[j][0] < stop:
            if max(offsets[j][0], begin) < min(offsets[j][1], stop):
                hit.append(j)
            j += 1
        if hit:
            ranges.append((hit[0], hit[-1] + 1))
            k = hit[-1]  # a token may reach into the next span
    return ranges


def before_trailing_blanks(first: int, last: int, blank: list[bool], special: list[bool]) -> int:
    """The end of a turn's tokens [first, last) without white space behind its end token.

    A template ends a turn with a special token and then perhaps a line break, which no model
    has to say: generation has stopped. White space behind ordinary text stays, since it may
    be all that ends the turn.
    """
    k = last
    while k > first and blank[k - 1] and not special[k - 1]:
        k -= 1
    return k if k > first and special[k - 1] else last
