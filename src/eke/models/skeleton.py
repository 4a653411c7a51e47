"""What a folder's `config.json` describes: the model's tensors, without any memory for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from eke.models.load import _loading, _transformers, load_config


@dataclass(frozen=True)
class Skeleton:
    """A model's tensors as its `state_dict()` names them.

    Attributes:
        architecture: the name of its class in transformers.
        shapes: every tensor's shape, tied ones under each of their names.
        tied: a tensor's further names -> the first name of the same tensor.
    """

    architecture: str
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]


def skeleton_of(folder: Path) -> Skeleton:
    """The model that a folder's `config.json` describes, built on the `meta` device.

    Raises:
        InputError: there is no such file, or transformers knows no such model.
        MissingExtraError: transformers is not installed.
    """
    transformers = _transformers()
    config = load_config(str(folder), None)
    # A causal model unless the file says that it is another of transformers' own classes.
    stated = (getattr(config, "architectures", None) or [""])[0]
    kind = getattr(transformers, stated, None) if stated.isidentifier() else None
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            model = _loading("folder", str(folder), "model", lambda: kind(config))
        else:
            auto = transformers.AutoModelForCausalLM
            model = _loading("folder", str(folder), "model", lambda: auto.from_config(config))
    first: dict[int, str] = {}
    shapes, tied = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        shapes[name] = tuple(tensor.shape)
        same = first.setdefault(id(tensor), name)
        if same != name:
            tied[name] = same
    return Skeleton(type(model).__name__, shapes, tied)
