"""Load or build a model from a source: built in, a folder, a hub id, or a GGUF file.

Weights are held in fp32; a `bf16` run computes in bf16 under autocast, with fp32 weights and
optimizer state, so that small updates are not rounded away.
"""

from __future__ import annotations

import contextlib
import copy
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from eke.errors import InputError, MissingExtraError
from eke.models.builtin import builtin_config

Kind = Literal["builtin", "gguf", "folder", "hub"]


@dataclass(frozen=True)
class LoadedModel:
    """A model in fp32 on the CPU, its tokenizer, and whether its weights are fresh."""

    model: Any
    tokenizer: Any
    from_scratch: bool


def parse_source(source: str) -> tuple[Kind, str]:
    """Tell what kind of source it is, and check that a local one exists.

    Raises:
        InputError: a local source does not exist or is not what it says it is.
    """
    if source.startswith("builtin:"):
        builtin_config(source[8:], vocab_size=8, bos=None, eos=None, pad=None)
        return "builtin", source[8:]
    if source.startswith("gguf:"):
        path = Path(source[5:]).expanduser()
        if not path.is_file():
            raise InputError(
                "model.source names a GGUF file that does not exist",
                value=source,
                fix="Give the path of a .gguf file after `gguf:`",
            )
        return "gguf", str(path)
    path = Path(source).expanduser()
    if path.is_file():
        raise InputError(
            "model.source is a file",
            value=source,
            rule="it is a folder, or a GGUF file with `gguf:` before its path",
            fix=f"Use gguf:{source}, or the folder that holds config.json",
        )
    if source and path.is_dir():  # Path("") is the working directory
        if not (path / "config.json").is_file():
            raise InputError(
                "model.source is a folder without a config.json",
                value=source,
                rule="a model folder is one written by save_pretrained",
                fix="Point it at the folder that holds config.json",
            )
        return "folder", str(path)
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if looks_local or not source:
        raise InputError(
            "model.source names a folder that does not exist",
            value=source,
            fix='Use a folder, a hub id such as "owner/name", "builtin:tiny" or "gguf:FILE"',
        )
    return "hub", source


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "train", "loading a model") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _arguments(kind: str, where: str) -> tuple[str, dict[str, Any]]:
    if kind == "gguf":
        path = Path(where)
        return str(path.parent), {"gguf_file": path.name}
    return where, {}


def _loading(kind: str, where: str, what: str, load: Any) -> Any:
    """Run one of transformers' loaders; its many failures become one clear error."""
    # transformers draws progress bars even where they are switched off.
    bars = contextlib.redirect_stderr(io.StringIO()) if kind == "gguf" else contextlib.nullcontext()
    try:
        with bars:
            return load()
    except Exception as error:  # its own and its libraries' errors have no base class in common
        fix = "Check that the files are complete and of a kind that transformers reads"
        if kind == "hub":
            fix = "Check the id and the network, or download the model and name its folder"
        text = " ".join(str(error).split())
        raise InputError(
            f"could not load the {what} from {where}: {text[:300]}", fix=fix
        ) from error


def _plain(model: Any) -> Any:
    """The same weights in a model that does not remember that it was quantized: transformers
    refuses to save one that does, although reading a GGUF file turned its weights into fp32."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.random.fork_rng(devices=[]):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    return plain


def load_tokenizer(source: str) -> Any:
    """The tokenizer that comes with a folder, hub id or GGUF file.

    Raises:
        InputError: it cannot be loaded, or the source is a built-in model.
    """
    folder = Path(source).expanduser()
    alone = (folder / "tokenizer_config.json").is_file() and not (folder / "config.json").exists()
    kind, where = ("folder", str(folder)) if alone else parse_source(source)
    if kind == "builtin":
        raise InputError(
            "a built-in model has no tokenizer of its own",
            value=source,
            rule="one is made from the training data",
            fix="Leave model.tokenizer out, or name a folder or hub id",
        )
    name, more = _arguments(kind, where)
    auto = _transformers().AutoTokenizer
    tokenizer = _loading(kind, where, "tokenizer", lambda: auto.from_pretrained(name, **more))
    return tokenizer


def load_config(source: str, tokenizer: Any) -> Any:
    """The model's configuration, without its weights; a built-in one takes `tokenizer`'s ids."""
    kind, where = parse_source(source)
    if kind == "builtin":
        return builtin_config(
            where,
            vocab_size=len(tokenizer),
            bos=tokenizer.bos_token_id,
            eos=tokenizer.eos_token_id,
            pad=tokenizer.pad_token_id,
        )
    name, more = _arguments(kind, where)
    auto = _transformers().AutoConfig
    return _loading(kind, where, "configuration", lambda: auto.from_pretrained(name, **more))


def _check_complete(where: str, info: dict[str, Any]) -> None:
    """Refuse weights that transformers would draw at random because the files do not have them."""
    absent = sorted(info["missing_keys"])
    other = sorted(name for name, *_ in info["mismatched_keys"])
    if not absent and not other:
        return
    kind, names = ("lack", absent) if absent else ("have another shape for", other)
    raise InputError(
        f"the files of {where} {kind} {len(names)} of the model's weights, such as {names[0]}",
        rule="config.json and the weights describe the same model",
        fix="Check that the download is complete and that config.json belongs to it",
    )


def load_model(source: str, tokenizer: Any, *, seed: int, meta: bool = False) -> LoadedModel:
    """The model in fp32, ready to train.

    Args:
        source: `builtin:tiny`, `builtin:small`, a folder, a hub id or `gguf:FILE`.
        tokenizer: checked against the model's embedding.
        seed: seeds the initial weights of a built-in model, and nothing else.
        meta: build it without weights, on the `meta` device, for planning.

    Raises:
        InputError: it cannot be loaded, its files lack some of its weights, or the tokenizer has
            ids that the model has no row for.
    """
    kind, where = parse_source(source)
    transformers = _transformers()
    config = load_config(source, tokenizer)
    auto = transformers.AutoModelForCausalLM
    if kind == "builtin" or meta:
        with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
            torch.manual_seed(seed)
            model = _loading(
                kind, where, "model", lambda: auto.from_config(config, dtype=torch.float32)
            )
    else:
        name, more = _arguments(kind, where)
        # Tensors of another shape are taken up below, where they can be named.
        more |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = _loading(
            kind, where, "model", lambda: auto.from_pretrained(name, dtype=torch.float32, **more)
        )
        _check_complete(where, info)
        if kind == "gguf":
            model = _plain(model)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise InputError(
            "the tokenizer does not belong to this model",
            value=f"{len(tokenizer)} tokens, {rows} embedding rows",
            rule="every token id needs a row of the embedding",
            fix="Set model.tokenizer to the tokenizer that the model was trained with",
        )
    model.config.use_cache = False
    return LoadedModel(model, tokenizer, from_scratch=kind == "builtin")
