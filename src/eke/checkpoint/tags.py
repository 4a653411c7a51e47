"""Whether encoded objects are of the form that `encode` gives them: from the JSON alone, no torch.

Property: every tree that `encode` makes is accepted, in time proportional to its size and without
recursion. What is refused is refused on opening, so that `verify` and `restore` agree on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eke.checkpoint.checks import ManifestError

MAX_DEPTH = 100
"""How deep values nest, at most; a dict's keys count as inside it."""

_TEXT = {
    "$int": re.compile(r"-?0x[0-9a-f]+"),
    "$float": re.compile(r"[0-9a-f]{16}"),
    "$bytes": re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"),
    "$dtype": re.compile(r"[a-z][a-z0-9_]*"),
    "$device": re.compile(r"[a-z]+(?::[0-9]+)?"),
    "$tensor": re.compile(r"(?s).*"),
    "$ndarray": re.compile(r"(?s).*"),
}
_SCALARS = {"$numpy", "$torch"}
_SEQUENCES = {"$tuple", "$set", "$frozenset", "$size"}
_DICTS = {"$dict", "$odict", "$counter"}
_HEX = re.compile(r"(?:[0-9a-f]{2})+")


def check_tree(tree: object) -> None:
    """Look at every tag of an encoded object.

    Raises:
        ManifestError: a tag is unknown, malformed or next to other keys, or it nests too deeply.
    """
    stack: list[tuple[object, int]] = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise ManifestError(f"an object is nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, list):
            stack += [(item, depth + 1) for item in node]
        elif isinstance(node, Mapping):
            stack += [(item, depth + 1) for item in _inside(node)]


def _inside(node: Mapping[str, Any]) -> list[Any]:
    """The values right inside a dict or a tag."""
    tag = next((key for key in node if key.startswith("$")), None)
    if tag is None:
        return list(node.values())
    if len(node) != 1:
        raise ManifestError(f"an object has the tag {tag[:40]!r} next to other keys")
    body = node[tag]
    if tag in _TEXT:
        if isinstance(body, str) and _TEXT[tag].fullmatch(body):
            return []
    elif tag in _SCALARS:
        pair = isinstance(body, list) and len(body) == 2
        if pair and all(isinstance(one, str) for one in body) and _HEX.fullmatch(body[1]):
            return []
    elif tag in _SEQUENCES:
        if isinstance(body, list):
            return body
    elif tag in _DICTS:
        if isinstance(body, list) and all(isinstance(p, list) and len(p) == 2 for p in body):
            return [item for pair in body for item in pair]
    else:
        raise ManifestError(f"an object has the unknown tag {tag[:40]!r}")
    raise ManifestError(f"an object has a malformed {tag!r}")
