"""An optimizer step is exact over micro-batches and ranks, and what it does is on record."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from eke.batching import Block, DynamicLoader
from eke.batching.tally import fixed_batches
from eke.budget import Budget
from eke.budget.flops import train_flops
from eke.budget.jsonl import read_records
from eke.training.billing import Biller
from eke.training.config import RunConfig
from eke.training.rundir import RunDir
from eke.training.schedule import Decay
from eke.training.session import Session
from eke.training.setup import Prepared, prepare
from eke.training.state import RunState
from eke.training.stepping import HISTOGRAM_BINS, SLOWEST_OF, Stepper, build_optimizer

# ---------------------------------------------------------------------- exactness

SCRIPT = Path(__file__).with_name("two_ranks.py")


def run_job(start_ranks: Any, directory: Path, ranks: int, *more: str) -> list[dict[str, Any]]:
    """What each rank saw. A job that hangs is killed and fails the test."""
    directory.mkdir()
    processes = start_ranks(ranks, SCRIPT, directory, *more)
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, errors
    return [json.loads((directory / f"rank-{r}.json").read_text()) for r in range(ranks)]


@pytest.fixture(scope="module")
def job(start_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The job of one rank, and that of two, each run once."""
    root = tmp_path_factory.mktemp("job")
    done: dict[Any, tuple[Path, list[dict[str, Any]]]] = {}

    def run(ranks: int, *more: str) -> tuple[Path, list[dict[str, Any]]]:
        key = (ranks, *more)
        if key not in done:
            directory = root / "-".join(map(str, key))
            done[key] = (directory, run_job(start_ranks, directory, ranks, *more))
        return done[key]

    return run


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("two_ranks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(script: Any, uids: list[list[int]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over all the samples' label tokens, and its gradients: one process, one sample
    at a time, without padding, scales or a loader."""
    model, samples = script.build_model(), script.Samples()
    total, labels = torch.zeros((), dtype=torch.float64), 0
    for _, index in uids:
        sample = samples[index]
        targets_T = sample["labels"][1:]
        if (targets_T != -100).sum() == 0:
            continue
        logits_TV = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
        total = total + F.cross_entropy(logits_TV, targets_T, reduction="sum")
        labels += int((targets_T != -100).sum())
    mean = total / labels
    mean.backward()
    return float(mean.detach()), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, []),
        (2, []),
        (2, ["stays"]),
        (2, ["packed"]),
        pytest.param(3, ["packed"], marks=pytest.mark.slow),
        pytest.param(3, ["stays"], marks=pytest.mark.slow),
        pytest.param(4, [], marks=pytest.mark.slow),
        pytest.param(4, ["packed"], marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process_on_the_same_samples(
    job: Any, script: Any, ranks: int, more: list[str]
) -> None:
    directory, seen = job(ranks, *more)
    gradients = [load_file(directory / f"gradients-{r}.safetensors") for r in range(ranks)]
    counts = {len(rank["steps"]) for rank in seen}
    assert counts == {len(seen[0]["steps"])}
    for i, steps in enumerate(zip(*(rank["steps"] for rank in seen), strict=True)):
        loss, expected = reference(script, [uid for step in steps for uid in step["uids"]])
        squares = sum(float((g**2).sum()) for g in expected.values())
        for rank, step in enumerate(steps):
            assert step["loss"] == pytest.approx(loss, abs=1e-10)
            assert step["norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)
            assert step["finite"]
            for name, gradient in expected.items():
                found = gradients[rank][f"{i}/{name}"]
                torch.testing.assert_close(found, gradient, rtol=0, atol=1e-10)


def test_the_jobs_were_hard(job: Any) -> None:
    """Else the test above would prove little: gradient accumulation, ranks with unequal labels,
    a rank that has nothing to do."""
    _, (alone,) = job(1)
    assert all(step["micro_batches"] > 2 for step in alone["steps"])
    _, (zero, one) = job(2, "stays")
    pairs = list(zip(zero["steps"], one["steps"], strict=True))
    assert all(a["micro_batches"] == b["micro_batches"] > 1 for a, b in pairs)
    assert sum(sum(a["labels"]) != sum(b["labels"]) for a, b in pairs) > len(pairs) / 2
    assert any(a["dummies"] or b["dummies"] for a, b in pairs)
    seen = sorted(tuple(uid) for rank in (zero, one) for s in rank["steps"] for uid in s["uids"])
    usable = [i for i in range(60) if not (i % 2 and 20 <= i < 40)]
    assert seen == [(epoch, i) for epoch in range(2) for i in usable]


def test_ranks_agree_on_the_outcome_and_on_the_state(job: Any) -> None:
    _, (zero, one) = job(2)
    for a, b in zip(zero["steps"], one["steps"], strict=True):
        for key in ("loss", "norm", "finite", "signalled", "save_due"):
            assert a[key] == b[key]
        # A signal on any rank counts; whether a save is due, rank 0 says.
        assert a["signalled"]
        assert a["save_due"]
    assert zero["state"] == one["state"]
    assert zero["state"]["step"] == len(zero["steps"])
    assert (zero["state"]["samples"], zero["state"]["dropped"]) == (100, 20)


# ---------------------------------------------------------------------- one rank, in this process


@pytest.fixture(scope="module")
def base(model_dir: Path, corpus: Path) -> Prepared:
    raw = {
        "model": {"source": str(model_dir)},
        "data": {"train": str(corpus), "overlength": "truncate", "max_length": 32, "workers": 0},
        "batch": {"per_step": "tokens:200", "micro_tokens": 64},
        "optimizer": {"lr": 0.01, "warmup_steps": 3},
        "run": {"device": "cpu"},
    }
    return prepare(RunConfig.from_mapping(raw))


@pytest.fixture
def session(base: Prepared, tmp_path: Path) -> Iterator[Session]:
    run, budget = RunDir(tmp_path / "run"), Budget(steps=50)
    run.open()
    prepared = replace(base, model=copy.deepcopy(base.model))
    yield Session(
        prepared, budget, RunState(), run, Biller(run.ledger, budget), lambda _: None, 0.0
    )
    run.close()


def stepper_of(session: Session) -> Stepper:
    p = session.prepared
    return Stepper(session, p.model, build_optimizer(p.model, p.config, p.device))


def blocks_of(session: Session, count: int) -> list[Block]:
    p = session.prepared
    with DynamicLoader(p.train, micro_tokens=64, per_step="tokens:200", window=64) as loader:
        return [block for _, block in zip(range(count), loader.blocks(), strict=False)]


def take(stepper: Stepper, session: Session, block: Block) -> Any:
    flops = stepper.cost(block)["flops"]
    return stepper.step(block, {"flops": flops}, session.spent(), signalled=False, save_due=False)


def metrics(session: Session) -> list[dict[str, Any]]:
    return [r.value for r in read_records(session.run.path / "metrics.jsonl")]


def test_groups_decay_matrices_only(session: Session) -> None:
    p = session.prepared
    p.model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    optimizer = build_optimizer(p.model, p.config, p.device)
    assert isinstance(optimizer, torch.optim.AdamW)
    matrices, vectors = optimizer.param_groups
    assert {t.ndim for t in matrices["params"]} == {2}
    assert {t.ndim for t in vectors["params"]} == {1}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert (matrices["lr"], matrices["betas"], matrices["eps"]) == (0.01, (0.9, 0.95), 1e-8)
    held = {id(t) for group in optimizer.param_groups for t in group["params"]}
    assert held == {id(t) for t in p.model.parameters() if t.requires_grad}
    assert len(held) == sum(len(group["params"]) for group in optimizer.param_groups)


def test_a_model_without_vectors_has_one_group(session: Session) -> None:
    model, p = torch.nn.Linear(3, 3, bias=False), session.prepared
    assert len(build_optimizer(model, p.config, p.device).param_groups) == 1


def test_training_lowers_the_loss_and_counts(session: Session) -> None:
    stepper, blocks = stepper_of(session), blocks_of(session, 12)
    before = [w.clone() for w in session.prepared.model.parameters()]
    outcomes = [take(stepper, session, block) for block in blocks]
    assert outcomes[-1].loss < outcomes[0].loss
    after = list(session.prepared.model.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert all(w.grad is None for w in after)
    state = session.state
    assert state.step == 12
    assert state.samples == sum(b.samples for b in blocks)
    assert state.tokens == sum(b.tokens for b in blocks)
    shape = session.prepared.shape
    flops = sum(train_flops(shape, b, t) for block in blocks for b, t in block.shapes)
    assert state.flops == flops == pytest.approx(session.run.ledger.spent("flops"))
    assert session.run.ledger.spent("tokens") == state.tokens


def test_a_step_that_is_not_finite_is_skipped_and_counted(session: Session) -> None:
    stepper, (first, bad, last) = stepper_of(session), blocks_of(session, 3)
    take(stepper, session, first)
    head = session.prepared.model.lm_head.weight
    kept = head[0, 0].item()
    with torch.no_grad():
        head[0, 0] = math.inf
    weights = {n: w.clone() for n, w in session.prepared.model.named_parameters()}
    outcome = take(stepper, session, bad)
    assert not outcome.finite
    assert not math.isfinite(outcome.loss)
    for name, weight in session.prepared.model.named_parameters():
        assert torch.equal(weight, weights[name])
        assert weight.grad is None
    assert (session.state.step, session.state.tokens) == (2, first.tokens + bad.tokens)
    assert [r["skipped"] for r in metrics(session)] == [False, True]
    with torch.no_grad():
        head[0, 0] = kept
    assert take(stepper, session, last).finite


def test_gradients_are_clipped_and_the_norm_is_from_before(session: Session) -> None:
    (block,) = blocks_of(session, 1)
    norms, lengths = [], []
    for clip in (0.0, 0.05):
        config = session.config.with_values({"optimizer": {"clip": clip}})
        session.prepared = replace(
            session.prepared, config=config, model=copy.deepcopy(session.prepared.model).eval()
        )
        stepper = stepper_of(session)
        seen: list[float] = []

        def look(optimizer: Any, *_: Any, seen: list[float] = seen) -> None:
            grads = [t.grad for g in optimizer.param_groups for t in g["params"]]
            seen.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))))

        stepper._optimizer.register_step_pre_hook(look)
        weights = copy.deepcopy(session.prepared.model.state_dict())
        norms.append(take(stepper, session, block).norm)
        session.prepared.model.load_state_dict(weights)
        lengths += seen
    assert norms[0] == norms[1] == pytest.approx(lengths[0], rel=1e-5)
    assert norms[0] > 0.05
    assert lengths[1] == pytest.approx(0.05, rel=1e-3)


def test_the_rate_follows_the_schedule(session: Session) -> None:
    stepper, blocks = stepper_of(session), blocks_of(session, 6)
    for block in blocks[:4]:
        take(stepper, session, block)
    session.state.lr_scale = 0.5
    take(stepper, session, blocks[4])
    session.state.decay = Decay({"steps": 1.0}, {"steps": 6.0}, "r")
    take(stepper, session, blocks[5])
    rates = [r["lr"] for r in metrics(session)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.005, 0.005 * (1 - 4 / 5)])
    assert [r["phase"] for r in metrics(session)] == ["warmup"] * 3 + ["stable"] * 2 + ["decay"]
    groups = stepper._optimizer.param_groups
    assert all(group["lr"] == rates[-1] for group in groups)


def test_what_a_step_did_is_on_record(session: Session) -> None:
    # Not every block has padding to bill.
    block = next(one for one in blocks_of(session, 8) if one.padded_tokens > one.tokens)
    stepper = stepper_of(session)
    outcome = take(stepper, session, block)
    (record,) = metrics(session)
    assert (record["kind"], record["step"], record["epoch"]) == ("step", 1, 0)
    assert (record["loss"], record["grad_norm"]) == (outcome.loss, outcome.norm)
    assert record["samples"] == block.samples == sum(record["lengths"])
    assert len(record["lengths"]) == HISTOGRAM_BINS
    assert record["tokens"] == block.tokens == sum(block.lengths)
    assert record["padded_tokens"] == block.padded_tokens > block.tokens
    assert record["label_tokens"] == block.label_tokens
    assert record["ranks"] == [list(one) for one in block.tallies]
    (real, padding, waiting, dummies), fixed = record["ranks"][0], record["fixed"]
    assert (real, real + padding) == (block.tokens, block.padded_tokens)
    assert (waiting, dummies) == (0, 0)
    longest = max(*session.prepared.lengths, *block.lengths)
    assert fixed["samples"] == 64 // longest == 2
    batches = fixed_batches(block.lengths, 1, 2)
    assert fixed["micro_batches"] == len(batches) == -(-block.samples // 2)
    padded = sum(len(batch) * max(batch) for (batch,) in batches)
    assert fixed["ranks"] == [[block.tokens, padded - block.tokens, 0, 0]]
    assert record["micro_batches"] == len(block) > 1
    assert (record["length_min"], record["length_max"]) == (min(block.lengths), max(block.lengths))
    assert record["tokens_per_s"] * record["step_s"] == pytest.approx(block.tokens)
    assert record["tokens_total"] == block.tokens
    assert record["flops_total"] == session.state.flops
    assert record["budget_used"] == 1 / 50
    bills = session.run.ledger.bills
    assert {b.what for b in bills} == {"train", "padding"}
    shape = session.prepared.shape
    useful = sum(train_flops(shape, 1, n) for n in block.lengths)
    assert bills[0].flops == pytest.approx(useful)


def test_fixed_batches_are_of_what_the_longest_sample_so_far_allows(session: Session) -> None:
    stepper, blocks = stepper_of(session), blocks_of(session, 3)
    take(stepper, session, blocks[0])
    session.state.longest = 64  # as if it had met one
    take(stepper, session, blocks[1])
    position = {**blocks[2].position, "micro_tokens": 256}
    take(stepper, session, replace(blocks[2], position=position))
    assert [r["fixed"]["samples"] for r in metrics(session)] == [2, 1, 4]
    alone = metrics(session)[1]["fixed"]
    assert alone["micro_batches"] == blocks[1].samples
    assert alone["ranks"] == [[blocks[1].tokens, 0, 0, 0]]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("loss", ["token", "sample", "sequence"])
def test_a_step_is_of_the_mean_that_was_asked_for(
    session: Session, loss: Any, packing: bool
) -> None:
    """Against a loop over the samples, one at a time."""
    p = session.prepared
    model = p.model.double().eval()
    with DynamicLoader(
        p.train, micro_tokens=64, per_step="tokens:200", window=64, loss=loss, packing=packing
    ) as loader:
        block = next(iter(loader.blocks()))
    total, labels, samples = torch.zeros((), dtype=torch.float64), 0, 0
    for _, index in (uid for micro in block for uid in micro.uids):
        item = p.train[index]
        targets_T = item["labels"][1:]
        if not (trained := int((targets_T != -100).sum())):
            continue
        logits_TV = model(input_ids=item["input_ids"][None]).logits[0, :-1]
        one = F.cross_entropy(logits_TV, targets_T, reduction="sum")
        total = total + (one / trained if loss == "sample" else one)
        labels, samples = labels + trained, samples + 1
    mean = total / (labels if loss == "token" else samples)
    expected = torch.autograd.grad(mean, list(model.parameters()))
    # Without clipping, and with a rate of 0: the gradients are looked at, the weights stay.
    config = p.config.with_values({"optimizer": {"clip": 0.0}})
    session.prepared = replace(p, config=config)
    stepper, seen = stepper_of(session), []
    stepper._optimizer.register_step_pre_hook(
        lambda *_: seen.extend(w.grad.clone() for w in model.parameters() if w.grad is not None)
    )
    outcome = take(stepper, session, block)
    assert outcome.loss == pytest.approx(float(mean.detach()), rel=1e-10)
    for found, wanted in zip(seen, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_a_sample_beyond_the_cap_is_in_the_histogram(session: Session) -> None:
    """`data.overlength = "solo"` keeps samples longer than data.max_length."""
    stepper, (block,) = stepper_of(session), blocks_of(session, 1)
    config = session.config.with_values({"data": {"max_length": min(block.lengths) + 1}})
    session.prepared = replace(session.prepared, config=config)
    take(stepper, session, block)
    (record,) = metrics(session)
    assert sum(record["lengths"]) == block.samples
    assert record["length_max"] > record["length_cap"]


def test_dropped_samples_are_counted(session: Session) -> None:
    stepper, (block,) = stepper_of(session), blocks_of(session, 1)
    counts = {**block.position["counts"], "empty": 3, "skipped": 4}
    take(stepper, session, replace(block, position={**block.position, "counts": counts}))
    assert session.state.dropped == 7


def test_a_step_costs_what_the_slowest_lately_did(session: Session) -> None:
    stepper, (block,) = stepper_of(session), blocks_of(session, 1)
    shape = session.prepared.shape
    flops = sum(train_flops(shape, b, t) for b, t in block.shapes)
    cost = stepper.cost(block)
    assert cost == {"flops": flops, "tokens": block.tokens, "steps": 1.0}  # no speed is known
    facts = replace(session.prepared.facts, flops_per_s=flops)
    session.prepared = replace(session.prepared, facts=facts)
    assert stepper.cost(block)["seconds"] == pytest.approx(1.5)
    session.budget = Budget(price_per_hour=7200.0)
    assert stepper.cost(block)["money"] == pytest.approx(3.0)
    for _ in range(SLOWEST_OF + 2):
        take(stepper, session, block)
    slowest = max(r["step_s"] for r in metrics(session)[-SLOWEST_OF:])
    assert stepper.cost(block)["seconds"] == pytest.approx(1.3 * slowest)


def test_energy_is_quoted_at_the_rate_so_far(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper, (block,) = stepper_of(session), blocks_of(session, 1)
    monkeypatch.setattr(Session, "spent", lambda _: {"flops": 1e9, "joules": 20.0})
    cost = stepper.cost(block)
    assert cost["joules"] == pytest.approx(1.3 * cost["flops"] * 2e-8)


def test_a_block_without_labels_has_no_loss(session: Session) -> None:
    stepper, (block,) = stepper_of(session), blocks_of(session, 1)
    for micro in block:
        micro["labels"].fill_(-100)
    silent = replace(block, label_tokens=0, loss_parts=0, micro_batches=tuple(
        replace(micro, label_tokens=0, scale=0.0) for micro in block
    ))  # fmt: skip
    outcome = take(stepper, session, silent)
    assert (outcome.loss, outcome.norm, outcome.finite) == (0, 0, True)
    assert metrics(session)[0]["loss"] is None
