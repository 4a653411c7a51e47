"""Everything a run needs before its first step: data, tokenizer, model, and no `auto` left.

Cheap things first, so that a mistake in the data is reported before a model is loaded.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from eke.budget.flops import DecoderShape, forward_flops, train_flops
from eke.data import (
    TokenizedDataset,
    builtin_tokenizer,
    check_rows,
    open_source,
    split_by_content,
)
from eke.distributed import barrier, gather_objects, world
from eke.errors import InputError
from eke.models import (
    BUILTIN_VOCAB,
    load_config,
    load_model,
    load_tokenizer,
    parse_source,
    shape_of,
)
from eke.training.config import RunConfig
from eke.training.evaluate import Holdout
from eke.training.loss import IGNORED, token_losses
from eke.training.packing import check_packing
from eke.training.probing import fits_in_memory, largest_fitting
from eke.training.resolve import Facts, resolve

PROBED_SAMPLES = 256
"""Training samples whose lengths stand for all."""


@dataclass
class Prepared:
    """A run that is ready to start. `config` has no `auto` left."""

    config: RunConfig
    device: torch.device
    model: Any
    tokenizer: Any
    shape: DecoderShape
    train: TokenizedDataset
    holdout: Holdout
    pad_id: int
    from_scratch: bool
    corpus: dict[str, Any]
    facts: Facts

    @property
    def lengths(self) -> Sequence[int]:
        """Lengths in tokens of a sample of the training data."""
        return self.facts.lengths

    @property
    def flops_per_s(self) -> float | None:
        """Probed speed; None when nothing needed it."""
        return self.facts.flops_per_s

    @property
    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context that the model computes in."""
        return autocast(self.config, self.device)


def pick_device(config: RunConfig) -> torch.device:
    """The device that `run.device` asks for. Raises InputError when it is not there."""
    wanted = config.run.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "run.device asks for CUDA and torch sees no CUDA device",
            value=wanted,
            fix='Set run.device = "auto" or "cpu", or mend the driver (`eke doctor`)',
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world().local_rank)


def autocast(config: RunConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """fp32: nothing. bf16: autocast."""
    if config.model.dtype != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _main_first(load: Callable[[], Any]) -> Any:
    """Run `load` on rank 0 before the others, so that what it caches is made once."""
    if world().is_main:
        value = load()
        barrier()
        return value
    barrier()
    return load()


def open_data(config: RunConfig) -> tuple[Any, Any, Any, Sequence[int], Sequence[int]]:
    """The tokenizer, the train and eval sources, and which of their rows are used for what."""
    kind, name = parse_source(config.model.source)
    train = _main_first(lambda: open_source(config.data.train))
    if config.model.tokenizer is not None:
        tokenizer = load_tokenizer(config.model.tokenizer)
    elif kind == "builtin":
        tokenizer = _main_first(lambda: builtin_tokenizer(train, BUILTIN_VOCAB[name]))
    else:
        tokenizer = load_tokenizer(config.model.source)
    keys = check_rows(train, config.data.format)
    if config.data.eval is None:
        # 256 examples make a difference of losses exact to about 0.2 %; a small corpus gives less.
        train_rows, eval_rows = split_by_content(
            keys, min_eval=max(2, min(256, len(keys) // 10)), seed=config.run.seed
        )
        if len(eval_rows) < 2:
            raise InputError(
                "the training data is too small to hold anything out",
                value=f"{len(keys)} rows, {len(set(keys))} of them different",
                rule="2 rows or more are held out, and no more than half",
                fix="Add rows, or name data.eval",
            )
        return tokenizer, train, train, train_rows, eval_rows
    held_out = open_source(config.data.eval)
    check_rows(held_out, config.data.format)
    if len(held_out) < 2:
        raise InputError(
            "data.eval has a single row", value=config.data.eval, rule="an error bar needs 2"
        )
    return tokenizer, train, held_out, range(len(train)), range(len(held_out))


def prepare(
    config: RunConfig, *, weights: bool = True, say: Callable[[str], None] = lambda _: None
) -> Prepared:
    """Load and check everything, and resolve every `auto`.

    Args:
        config: what to train.
        weights: False to plan only: the model is built without weights, on the `meta` device, and
            its speed is probed on a clone of one and two blocks.
        say: told what is being done.

    Raises:
        InputError: data, tokenizer, model or limits do not fit together.
    """
    device = pick_device(config)
    say("reading the data")
    tokenizer, source, eval_source, train_rows, eval_rows = open_data(config)
    model_config = load_config(config.model.source, tokenizer)
    config = _resolve_data(config, model_config, device)
    max_length, overlength = config.data.max_length, config.data.overlength
    assert isinstance(max_length, int)
    assert overlength != "auto"

    def dataset(rows_of: Any, rows: Sequence[int], policy: Any) -> TokenizedDataset:
        return TokenizedDataset(
            rows_of,
            rows,
            tokenizer,
            format=config.data.format,
            max_length=max_length,
            overlength=policy,
        )

    train = dataset(source, train_rows, overlength)
    # What is too long for training must not end a run at an evaluation.
    eval_data = dataset(eval_source, eval_rows, "truncate" if overlength == "solo" else overlength)
    train.check_lengths()
    probed = [train[i] for i in _spread(len(train), PROBED_SAMPLES)]
    lengths = [len(s["input_ids"]) for s in probed if len(s["input_ids"]) > 1]
    if not lengths:
        raise InputError(
            "no training sample has two tokens or more",
            value=config.data.train,
            fix="Check data.format, data.max_length and data.overlength",
        )
    if not any(bool((s["labels"][1:] != IGNORED).any()) for s in probed):
        raise InputError(
            "the training data has nothing to learn from",
            value=config.data.train,
            rule=f"none of {len(probed)} samples has a supervised token",
            fix="Give the rows a response (an assistant's turn), or raise data.max_length",
        )
    say("loading the model" if weights else "probing the speed")
    loaded = load_model(config.model.source, tokenizer, seed=config.run.seed, meta=not weights)
    shape = shape_of(loaded.model)
    # transformers loads a folder's model in evaluation mode, without its dropout.
    model = loaded.model.to(device).train() if weights else loaded.model
    budget = config.budget.parse()
    speed, context = None, autocast(config, device)
    if weights and config.batch.packing:
        check_packing(model, shape.vocab, device, context)
    # Dropout and a clone's first weights must not move the run's random numbers.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if not weights:
            speed = probe_clones(model, max(lengths), device, context)
        elif budget.seconds is not None or budget.money is not None:
            speed = probe_speed(model, shape, max(lengths), device, context)
    facts = Facts(
        shape=shape,
        lengths=lengths,
        n_train=len(train),
        n_eval=len(eval_data),
        world_size=world().size,
        device=device.type,
        from_scratch=loaded.from_scratch,
        # Ranks measure different things and must resolve alike: the poorest decides.
        free_bytes=min(gather_objects(_free_bytes(device))),
        flops_per_s=None if speed is None else min(gather_objects(speed)),
    )
    left_to_eke = config.batch.micro_tokens == "auto"
    config = resolve(config, facts)
    if weights and left_to_eke:
        say("trying how much fits into memory")
        config = _with_probed_memory(config, model, max(lengths), device, context)
    say("reading the evaluation examples")
    n_eval = config.data.eval_examples
    micro = config.batch.micro_tokens
    assert isinstance(n_eval, int)
    assert isinstance(micro, int)
    pad_id = _pad_id(tokenizer)
    examples = [eval_data[i] for i in _spread(len(eval_data), n_eval)]
    holdout = Holdout(examples, micro, pad_id, config.batch.loss)
    corpus = {
        "name": source.name,
        "fingerprint": source.fingerprint,
        "rows": len(source),
        "train": len(train),
        "eval": len(holdout),
    }
    return Prepared(
        config,
        device,
        model,
        tokenizer,
        shape,
        train,
        holdout,
        pad_id,
        loaded.from_scratch,
        corpus,
        facts,
    )


def _with_probed_memory(
    config: RunConfig,
    model: Any,
    longest: int,
    device: torch.device,
    context: contextlib.AbstractContextManager[Any],
) -> RunConfig:
    """The configuration with as many tokens in a pass as fit on every rank, at most as resolved.

    Raises:
        InputError: the longest sample that was looked at does not fit.
    """
    most = config.batch.micro_tokens
    assert isinstance(most, int)

    def fits(tokens: int) -> bool:
        packing = config.batch.packing
        return fits_in_memory(model, tokens, longest, device, context, packing=packing)

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        found = largest_fitting(fits, min(longest, most), most)
    found = min(gather_objects(found))
    if not found:
        raise InputError(
            "the model and the longest of the samples that were looked at do not fit into memory",
            value=f"{longest} tokens",
            rule="a forward and a backward pass on it, beside the optimizer's state, fit",
            fix="Set data.max_length lower and data.overlength to truncate or skip, or choose a "
            "smaller model",
        )
    return config.with_values({"batch": {"micro_tokens": found}})


def _resolve_data(config: RunConfig, model_config: Any, device: torch.device) -> RunConfig:
    """The `auto`s that samples depend on."""
    values: dict[str, Any] = {}
    context = int(getattr(model_config, "max_position_embeddings", None) or 2048)
    if config.data.max_length == "auto":
        values["max_length"] = context
    elif config.data.max_length > context:
        raise InputError(
            "data.max_length is longer than the model's context",
            value=config.data.max_length,
            rule=f"the model takes {context} tokens",
            fix=f"Set data.max_length to {context} or less",
        )
    if config.data.overlength == "auto":
        builtin = isinstance(config.data.train, str) and config.data.train.startswith("builtin:")
        values["overlength"] = "truncate" if builtin else "error"
    if config.data.workers == "auto":
        values["workers"] = 2 if device.type == "cuda" else 1
    more: dict[str, dict[str, Any]] = {"data": values, "run": {"device": device.type}}
    if config.model.dtype == "auto":
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        more["model"] = {"dtype": "bf16" if bf16 else "fp32"}
    return config.with_values(more)


def _spread(n: int, wanted: int) -> list[int]:
    """At most `wanted` of n positions, evenly spread."""
    if n <= wanted:
        return list(range(n))
    return [i * n // wanted for i in range(wanted)]


def _pad_id(tokenizer: Any) -> int:
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if value is not None:
            return int(value)
    return 0


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // world().size


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the faster of two runs: the first one also warms caches."""
    best = float("inf")
    for _ in range(2):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def probe_speed(
    model: Any,
    shape: DecoderShape,
    length: int,
    device: torch.device,
    context: contextlib.AbstractContextManager[Any],
) -> float:
    """FLOPs a second of a forward pass over about 1,024 positions."""
    rows = max(1, 1024 // length)
    ids_BT = torch.zeros((rows, length), dtype=torch.long, device=device)
    with torch.no_grad(), context:
        seconds = _timed(lambda: model(input_ids=ids_BT), device)
    return forward_flops(shape, rows, length) / seconds


def probe_clones(
    model: Any,
    length: int,
    device: torch.device,
    context: contextlib.AbstractContextManager[Any],
) -> float:
    """Training FLOPs a second of `model`, which has no weights, by timing clones of it.

    Clones of one and of two blocks run forward, backward and update; what the second block adds
    is a block's time, the rest is the embedding's, the head's and the loss's.
    """
    rows = max(1, 512 // length)
    layers = len(shape_of(model).blocks)
    seconds = []
    for n in (1, 2):
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = n
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:n]
        clone = type(model)(config).to(device)
        optimizer = torch.optim.AdamW(clone.parameters(), foreach=True)
        ids_BT = torch.zeros((rows, length), dtype=torch.long, device=device)
        batch = {
            "input_ids": ids_BT,
            "labels": ids_BT,
            "attention_mask": torch.ones_like(ids_BT),
        }

        def step(
            clone: Any = clone, optimizer: Any = optimizer, batch: dict[str, Any] = batch
        ) -> None:
            with context:
                loss = token_losses(clone, batch).mean()
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        seconds.append(_timed(step, device))
    block_s = max(seconds[1] - seconds[0], 0.0)
    whole_s = seconds[0] + block_s * (layers - 1)
    return train_flops(shape_of(model), rows, length) / whole_s
