"""Which tensors an encoded object names: read from the JSON alone, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def references(tree: object) -> Iterator[str]:
    """Every name behind a `$tensor` or `$ndarray` tag, in order."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(reversed(node))
        elif isinstance(node, Mapping):
            for tag in ("$tensor", "$ndarray"):
                if tag in node and isinstance(node[tag], str):
                    yield node[tag]
            stack.extend(reversed(list(node.values())))
