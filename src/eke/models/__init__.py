"""Models: load or build one, and its shape as plain data."""

from eke.models.builtin import BUILTIN_VOCAB, builtin_config
from eke.models.load import LoadedModel, load_config, load_model, load_tokenizer, parse_source
from eke.models.shape import shape_of

__all__ = [
    "BUILTIN_VOCAB",
    "LoadedModel",
    "builtin_config",
    "load_config",
    "load_model",
    "load_tokenizer",
    "parse_source",
    "shape_of",
]
