"""One optimizer step: exact token-mean gradients over micro-batches and ranks, logged and billed.

Shape letters: B sequences, T positions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eke.batching import Block
from eke.batching.tally import fixed_tally
from eke.budget.flops import train_flops
from eke.budget.meters import resident_bytes
from eke.distributed import average_gradients, gather_objects, world
from eke.training.config import RunConfig
from eke.training.limits import add
from eke.training.loss import token_losses
from eke.training.memory import Shortage, is_out_of_memory, shortages_of
from eke.training.schedule import lr_factor, phase
from eke.training.session import Session

HISTOGRAM_BINS = 24
SLOWEST_OF = 20
"""A step's time is predicted from the slowest of so many steps before it."""


def build_optimizer(
    model: torch.nn.Module, config: RunConfig, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors (norms, biases) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    lr = config.optimizer.lr
    assert isinstance(lr, float)
    groups = [
        ([p for p in trained if p.ndim >= 2], config.optimizer.weight_decay),
        ([p for p in trained if p.ndim < 2], 0.0),
    ]
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in groups if params],
        lr=lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        # One kernel over all parameters: the loop over them costs more than the arithmetic.
        fused=device.type == "cuda",
        foreach=device.type != "cuda",
    )


@dataclass(frozen=True)
class StepOutcome:
    """A step as all ranks agree on it."""

    loss: float
    norm: float
    finite: bool
    signalled: bool
    save_due: bool
    shortages: Mapping[int, Shortage] = field(default_factory=dict)
    """The ranks that ran out of memory: the step did not take place if there are any."""


class Stepper:
    """Owns the (wrapped) model and the optimizer; `updated` is called after every update."""

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        updated: Callable[[], None] = lambda: None,
    ) -> None:
        self._s, self._model, self._optimizer = session, model, optimizer
        self._updated = updated
        self._slowness: list[float] = []

    def cost(self, block: Block) -> dict[str, float]:
        """What the block costs: FLOPs, tokens and steps exactly, time from recent steps."""
        s, p = self._s, self._s.prepared
        flops = sum(train_flops(p.shape, b, t) for b, t in block.shapes)
        cost = {"flops": flops, "tokens": float(block.tokens), "steps": 1.0}
        if self._slowness:
            cost["seconds"] = flops * max(self._slowness) * 1.3
        elif p.flops_per_s:
            cost["seconds"] = flops / p.flops_per_s * 1.5
        spent = s.spent()
        if spent.get("joules") and spent.get("flops"):
            cost["joules"] = flops * spent["joules"] / spent["flops"] * 1.3
        return s.with_money(cost)

    def step(
        self,
        block: Block,
        cost: Mapping[str, float],
        spent: Mapping[str, float],
        *,
        signalled: bool,
        save_due: bool,
    ) -> StepOutcome:
        """Train on a block, unless its loss is not finite; either way it counts as a step.

        A block that does not fit into some rank's memory does not count: no rank trains on it.
        """
        s, p, state = self._s, self._s.prepared, self._s.state
        flops = cost["flops"]
        # The rate of the middle of the step: a decay of one step is one at half the rate.
        lr = self._set_lr(add(spent, {unit: amount / 2 for unit, amount in cost.items()}))
        loss_sum, shortage = self._accumulate(block)
        s.timeline.lap("forward and backward")
        views = gather_objects([loss_sum, shortage, signalled, save_due])
        any_signal, all_save_due = any(v[2] for v in views), bool(views[0][3])
        shortages = shortages_of([v[1] for v in views])
        if shortages:
            self._optimizer.zero_grad(set_to_none=True)
            return StepOutcome(math.nan, math.nan, False, any_signal, all_save_due, shortages)
        average_gradients(p.model.parameters())
        clip = s.config.optimizer.clip or math.inf
        # Of averaged gradients, which are the same bits on every rank.
        norm = float(torch.nn.utils.clip_grad_norm_(p.model.parameters(), clip))
        loss = math.fsum(v[0] for v in views) / max(1, block.loss_parts)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self._optimizer.step()
        self._updated()
        self._optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.samples += block.samples
        counts = block.position["counts"]
        state.dropped = counts["empty"] + counts["skipped"]
        state.tokens += block.tokens
        state.longest = max(state.longest, *s.prepared.lengths, *block.lengths)
        state.flops += flops
        s.timeline.lap("optimizer")
        self._log(block, flops, loss, norm, lr, spent, finite)
        return StepOutcome(loss, norm, finite, any_signal, all_save_due)

    def _accumulate(self, block: Block) -> tuple[float, Shortage | None]:
        """This rank's gradients of the block, and the sum of its losses; or what did not fit."""
        p = self._s.prepared
        loss_sum = torch.zeros((), dtype=torch.float64)
        for micro in block:
            try:
                with self._gradients_stay_local():
                    batch = {k: v.to(p.device, non_blocking=True) for k, v in micro.items()}
                    with p.autocast:
                        losses = token_losses(self._model, batch)
                    if micro.loss == "sample":
                        weights = micro.weights[:, 1:]
                        losses = losses * weights.to(p.device, losses.dtype)
                    micro_sum = losses.sum()
                    torch.autograd.backward(micro_sum * micro.scale)
                loss_sum += micro_sum.detach().double().cpu()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # The text alone is kept: the error holds on to all that the passes computed.
                return math.nan, Shortage.of(error, micro.padded_tokens, len(micro.uids))
        return float(loss_sum), None

    def _set_lr(self, spent: Mapping[str, float]) -> float:
        s, state = self._s, self._s.state
        warmup, peak = s.config.optimizer.warmup_steps, s.config.optimizer.lr
        assert isinstance(warmup, int)
        assert isinstance(peak, float)
        progress = None if state.decay is None else state.decay.progress(spent)
        lr = peak * state.lr_scale * lr_factor(state.step, warmup, progress)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _gradients_stay_local(self) -> contextlib.AbstractContextManager[Any]:
        """DDP would exchange them in the backward pass, before all are known to get through it."""
        model: Any = self._model
        if world().size > 1:
            return model.no_sync()  # type: ignore[no-any-return]
        return contextlib.nullcontext()

    def _log(
        self,
        block: Block,
        flops: float,
        loss: float,
        norm: float,
        lr: float,
        spent: Mapping[str, float],
        finite: bool,
    ) -> None:
        s, state, shape = self._s, self._s.state, self._s.prepared.shape
        if s.biller is None:
            return
        useful = sum(train_flops(shape, 1, n) for n in block.lengths)
        seconds = s.biller.charge_step(
            state.step, useful_flops=useful, flops=flops, tokens=block.tokens
        )
        s.slow_down.step(seconds, flops)
        self._slowness = [*self._slowness[1 - SLOWEST_OF :], seconds / flops]
        warmup, cap = s.config.optimizer.warmup_steps, s.config.data.max_length
        assert isinstance(warmup, int)
        assert isinstance(cap, int)
        # Longer samples than the cap (data.overlength = "solo") go into the last bin.
        shown = np.minimum(block.lengths, cap)
        counts, _ = np.histogram(shown, bins=HISTOGRAM_BINS, range=(0, cap))
        record = {
            "kind": "step",
            "step": state.step,
            "epoch": block.epoch,
            "phase": phase(state.step - 1, warmup, state.decay),
            "loss": loss if block.loss_parts else None,
            "skipped": not finite,
            "lr": lr,
            "grad_norm": norm,
            "samples": block.samples,
            "tokens": block.tokens,
            "label_tokens": block.label_tokens,
            "padded_tokens": block.padded_tokens,
            "micro_batches": len(block),
            "ranks": block.tallies,
            "fixed": self._fixed(block),
            "length_min": min(block.lengths, default=0),
            "length_mean": block.tokens / max(1, block.samples),
            "length_max": max(block.lengths, default=0),
            "lengths": counts.tolist(),
            "length_cap": cap,
            "step_s": seconds,
            "rss_bytes": resident_bytes(),
            "tokens_per_s": block.tokens / seconds,
            "flops_total": state.flops,
            "tokens_total": state.tokens,
            "budget_used": s.budget.share({**spent, "steps": float(state.step)})[0],
        }
        s.log("metrics", record)

    def _fixed(self, block: Block) -> dict[str, Any]:
        """What the step would have been with plain fixed batches of its samples, under the same
        cap: so many samples in each that the longest fit that the run has met."""
        most = max(1, block.position["micro_tokens"] // self._s.state.longest)
        tallies, steps = fixed_tally(block.lengths, world().size, most)
        return {"samples": most, "micro_batches": steps, "ranks": tallies}
