"""Claim: the Trainer's loop (ledger, metrics, limits, aligned loader) costs little over a plain
PyTorch loop on the same batches, and trains more real tokens a second than a loop, or
transformers' Trainer, that pads samples in order of arrival.

Every arm trains a fresh `builtin:tiny` on the same `builtin:pydocs` samples, 16 a step, with
AdamW, for the same number of steps, without evaluation or saving; the figure is real (not
padding) tokens a second over the steps after the first few, which warm up.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import interleaved, report

STEPS, WARM, PER_STEP, LENGTH = 40, 8, 16, 256
TOML = f"""\
[run]
deterministic = false
[model]
source = "builtin:tiny"
[data]
train = "builtin:pydocs"
max_length = {LENGTH}
eval_examples = 2
workers = 0
[budget]
steps = {STEPS}
[batch]
per_step = "samples:{PER_STEP}"
micro_tokens = 1024
[optimizer]
lr = 1e-3
warmup_steps = 1
[governor]
actions = []
reserve = 0.0
eval_every = "100000 steps"
[checkpoint]
every = "100000 steps"
"""


def prepared() -> Any:
    from eke.training.config import RunConfig, tomllib
    from eke.training.setup import prepare

    return prepare(RunConfig.from_mapping(tomllib.loads(TOML)))


def eke_trainer() -> float:
    from eke.budget.jsonl import read_records
    from eke.training import RunConfig, Trainer
    from eke.training.config import tomllib

    with tempfile.TemporaryDirectory() as where:
        raw = tomllib.loads(TOML)
        raw["run"] |= {"dir": where, "name": "run"}
        Trainer(RunConfig.from_mapping(raw)).train()
        records = [r.value for r in read_records(Path(where) / "run" / "metrics.jsonl")]
    steps = [r for r in records if r["kind"] == "step"]
    # From line to line, so that what happens between two steps counts as well.
    seconds = steps[-1]["t"] - steps[WARM - 1]["t"]
    return sum(s["tokens"] for s in steps[WARM:]) / seconds


def plain_loop(*, grouped: bool) -> float:
    """A loop as anybody writes it: on the loader's own batches, or on samples as they come."""
    from eke.batching import DynamicLoader
    from eke.training.loss import token_losses
    from eke.training.stepping import build_optimizer

    p = prepared()
    loader = DynamicLoader(
        p.train,
        micro_tokens=1024 if grouped else 10**9,
        per_step=f"samples:{PER_STEP}",
        pad_token_id=p.pad_id,
        overlength="solo",
        epochs=1,
    )
    with loader:
        blocks = []
        for block in loader.blocks():
            blocks.append(block)
            if len(blocks) == STEPS:
                break
        optimizer = build_optimizer(p.model, p.config, p.device)
        started = 0.0
        for i, block in enumerate(blocks):
            if i == WARM:
                started = time.perf_counter()
            for micro in block:
                (token_losses(p.model, micro).sum() * micro.scale).backward()
            torch.nn.utils.clip_grad_norm_(p.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
    return sum(b.tokens for b in blocks[WARM:]) / seconds


def transformers_trainer() -> float:
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

    p = prepared()

    class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(p.train)

        def __getitem__(self, i: int) -> dict[str, Any]:
            item = p.train[i]
            return {k: item[k].tolist() for k in ("input_ids", "labels")}

    class Clock(TrainerCallback):  # type: ignore[misc]
        started = 0.0
        tokens_before = 0
        seconds = 0.0
        tokens = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM:
                self.started, self.tokens_before = time.perf_counter(), real["tokens"]
            if state.global_step == STEPS:
                self.seconds = time.perf_counter() - self.started
                self.tokens = real["tokens"] - self.tokens_before

    real = {"tokens": 0}
    collate = DataCollatorForSeq2Seq(p.tokenizer, padding=True)

    def counted(items: list[dict[str, Any]]) -> Any:
        real["tokens"] += sum(len(i["input_ids"]) for i in items)
        return collate(items)

    with tempfile.TemporaryDirectory() as where:
        arguments = TrainingArguments(
            output_dir=where,
            max_steps=STEPS,
            per_device_train_batch_size=PER_STEP,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_num_workers=0,
        )
        clock = Clock()
        Trainer(
            p.model, arguments, data_collator=counted, train_dataset=Samples(), callbacks=[clock]
        ).train()
    return clock.tokens / clock.seconds


def main() -> None:
    arms = {
        "plain loop": lambda: plain_loop(grouped=False),
        "plain loop, our batches": lambda: plain_loop(grouped=True),
        "eke Trainer": eke_trainer,
        "transformers Trainer": transformers_trainer,
    }
    workload = f"builtin:tiny, {PER_STEP} samples of builtin:pydocs a step, {STEPS - WARM} steps"
    results = interleaved(arms, repetitions=5)
    report("loop_throughput", workload, "real tokens/s", results, baseline="plain loop")


if __name__ == "__main__":
    main()
