"""The model of a run that is not finished yet: its configuration and tokenizer, without weights."""

from __future__ import annotations

from pathlib import Path

from eke.models import load_model
from eke.training.config import RunConfig
from eke.training.setup import open_data


def describe_model(run_toml: Path, folder: Path) -> None:
    """Write what `save_pretrained` of the run's model would, but for the weights.

    Raises:
        InputError: the run's data or model are not where its configuration says.
    """
    config = RunConfig.load(run_toml)
    tokenizer = open_data(config)[0]
    model = load_model(config.model.source, tokenizer, seed=config.run.seed, meta=True).model
    model.config.use_cache = True
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.use_cache = True
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
