"""One rank of a job, one or several; run by test_stepping.py with torchrun's environment.

Takes a directory, and perhaps `packed` or `stays`; trains a Llama in float64 on samples whose label
counts differ, through the real loader, DDP and Stepper, with an optimizer that keeps the gradients
it is given and leaves the weights alone. Writes `rank-R.json` (what was seen) and
`gradients-R.safetensors`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eke.batching import DynamicLoader
from eke.budget import Budget
from eke.budget.flops import train_flops
from eke.distributed import init, shutdown, world, wrap
from eke.models import shape_of
from eke.training.billing import Biller
from eke.training.config import RunConfig
from eke.training.evaluate import Holdout
from eke.training.resolve import Facts
from eke.training.rundir import RunDir
from eke.training.session import Session
from eke.training.setup import Prepared
from eke.training.state import RunState
from eke.training.stepping import Stepper

VOCAB, SAMPLES, MICRO_TOKENS, PER_STEP = 61, 60, 48, "tokens:120"


class Samples:
    """Item i has 1 to 31 tokens, of which none to all train; for a while every other has none.

    In the order of the dataset those are the second rank's, which is left with nothing to do.
    """

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        n = 0 if index % 2 and 20 <= index < 40 else 1 + (index * 29) % 31
        ids = (torch.arange(n) * 7 + index * 13) % VOCAB
        labels = ids.clone()
        labels[: (index * 5) % (n + 1)] = -100
        return {"input_ids": ids, "labels": labels, "index": index}


class Float64Norm(torch.nn.Module):
    """transformers' norm rounds to float32, whatever the type: where a sum that was added in
    another order falls on the other side of a step of float32, gradients would differ by 1e-8."""

    def __init__(self, norm: LlamaRMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(states, self.weight.shape, self.weight, self.eps)


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.1,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).double()
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            model.set_submodule(name, Float64Norm(module))
    return model


class Keeper(torch.optim.Optimizer):
    """Keeps a copy of each step's gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.0})
        self._model = model
        self.kept: list[dict[str, torch.Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.kept.append(
            {n: p.grad.clone() for n, p in self._model.named_parameters() if p.grad is not None}
        )


def main(directory: Path, *, packing: bool, move: bool) -> None:
    init()
    rank, cpu = world().rank, torch.device("cpu")
    model, samples = build_model(), Samples()
    shape = shape_of(model)
    config = RunConfig.from_mapping(
        {
            "data": {"max_length": 32, "overlength": "truncate"},
            "batch": {"per_step": PER_STEP, "micro_tokens": MICRO_TOKENS},
            "optimizer": {"lr": 0.001, "warmup_steps": 0, "clip": 0.0},
        }
    )
    facts = Facts(shape, [16], SAMPLES, 2, world().size, "cpu", True, 2**30, None)
    holdout = Holdout([samples[7], samples[9]], MICRO_TOKENS, 0)
    prepared = Prepared(
        config, cpu, model, None, shape, samples, holdout, 0, True, {}, facts  # type: ignore[arg-type]
    )  # fmt: skip
    run, budget = RunDir(directory / "run"), Budget(epochs=2)
    biller = None
    if world().is_main:
        run.open()
        biller = Biller(run.ledger, budget)
    session = Session(prepared, budget, RunState(), run, biller, lambda _: None, 0.0)
    keeper = Keeper(model)
    stepper = Stepper(session, wrap(model, cpu), keeper)
    loader = DynamicLoader(
        samples,  # type: ignore[arg-type]
        micro_tokens=MICRO_TOKENS,
        per_step=PER_STEP,
        window=16,
        shuffle=False,
        epochs=2,
        packing=packing,
        move_samples=move,
    )
    steps: list[dict[str, Any]] = []
    with loader:
        for block in loader.blocks():
            cost = stepper.cost(block)
            assert cost["flops"] == sum(train_flops(shape, b, t) for b, t in block.shapes)
            if packing:  # each sample by itself, and dummies
                shapes = Counter(block.shapes)
                assert Counter((1, n) for n in block.lengths) <= shapes
                assert sum(t for _, t in block.shapes) == block.padded_tokens
            outcome = stepper.step(
                block, cost, session.spent(), signalled=rank == 1, save_due=rank == 0
            )
            steps.append(
                {
                    "uids": [list(uid) for micro in block for uid in micro.uids],
                    "micro_batches": len(block),
                    "dummies": sum(micro.is_dummy for micro in block),
                    "labels": [micro.label_tokens for micro in block],
                    "loss": outcome.loss,
                    "norm": outcome.norm,
                    "finite": outcome.finite,
                    "signalled": outcome.signalled,
                    "save_due": outcome.save_due,
                }
            )
    state = session.state.state_dict()
    (directory / f"rank-{rank}.json").write_text(json.dumps({"steps": steps, "state": state}))
    save_file(
        {f"{i}/{name}": g for i, kept in enumerate(keeper.kept) for name, g in kept.items()},
        directory / f"gradients-{rank}.safetensors",
    )
    run.close()
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), packing="packed" in sys.argv[2:], move="stays" not in sys.argv[2:])
