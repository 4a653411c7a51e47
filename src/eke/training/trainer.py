"""The Trainer: the one loop where the parts meet.

Each turn: take a block, ask the limits whether it may be trained, train it, log and bill it; when
due, evaluate and ask the governor; when due, save. Rank 0 owns the clock, the logs and what
depends on them, and tells the others, so that all ranks leave at the same step.

Properties (tested on real processes): killed at any moment and started again, a run ends with the
same weights, bit by bit, as one that was not (its limits being on progress); no limit is passed;
the bills add up to the wall clock.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eke import distributed
from eke.batching import DynamicLoader
from eke.budget import Budget, Decision
from eke.budget.jsonl import read_records
from eke.budget.meters import process_age_s
from eke.checkpoint import Checkpointer, Keep
from eke.distributed import world
from eke.errors import EkeError, InputError
from eke.training import memory
from eke.training.billing import Biller
from eke.training.config import Cadence, RunConfig
from eke.training.finish import write_model
from eke.training.limits import Move, next_move
from eke.training.oversight import Oversight
from eke.training.plan import plan_of
from eke.training.raising import check_limits, decay_under, goes_on, progress_of
from eke.training.resolve import budget_of
from eke.training.rundir import RunDir, continued, read_status
from eke.training.saving import Saving, other_data
from eke.training.session import Observer, Session, agreed, steadfast
from eke.training.setup import Prepared, pick_device, prepare
from eke.training.state import RunState
from eke.training.stepping import Stepper, build_optimizer
from eke.training.timeline import Timeline


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        state: `finished` or `interrupted`.
        exit_code: 0 done, 3 stopped by its budget with a finished model, 130 interrupted after a
            checkpoint.
        loss: held-out loss of the finished model, where it was evaluated; see `Scores.loss`.
        resumed_from: the step that this process went on from.
        trained: False when the run had been finished before.
    """

    run_dir: Path
    state: str
    reason: str
    step: int
    exit_code: int
    loss: float | None = None
    resumed_from: int | None = None
    trained: bool = True


class Trainer:
    """Trains one run, from its start or from its newest checkpoint.

    Args:
        config: what to train; see `RunConfig.load`.
        observer: told every record that goes into `metrics.jsonl` and `decisions.jsonl`, and what
            is being prepared (`{"kind": "say"}`), on rank 0.
        last_words: called with the run's directory when all is written, before the last bill:
            writes a report, for example.
        whole_process: whether the run's clock starts with this process, imports included, as in
            `eke train`; else it starts with `train`.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        observer: Observer = lambda _: None,
        last_words: Callable[[Path], object] | None = None,
        whole_process: bool = False,
    ) -> None:
        self._given = config
        self._observer = steadfast(observer)
        self._whole_process = whole_process
        self._born = 0.0
        self._biller: Biller | None = None
        self._timeline: Timeline | None = None
        self._last_words = last_words
        self._signal: int | None = None
        self._state = RunState()

    def train(self) -> Result:
        """Run to the end. Returns how it ended.

        Raises:
            InputError: something is wrong with what was asked for; nothing was lost.
            EkeError: something failed on the way; the newest checkpoint is as it was.
        """
        self._born = time.perf_counter() - (process_age_s() if self._whole_process else 0.0)
        distributed.init(pick_device(self._given))
        try:
            with self._signals():
                return self._train()
        finally:
            distributed.shutdown()

    def _train(self) -> Result:
        run = RunDir(self._given.run_dir)
        stored = run.stored_config(self._given)
        status = read_status(run.path)
        finished = stored is not None and status.get("state") == "finished"
        if finished and not goes_on(status, budget_of(self._given).limits()):
            return Result(
                run.path,
                "finished",
                status["reason"],
                status["step"],
                status["exit_code"],
                status.get("loss"),
                trained=False,
            )
        distributed.barrier()  # all ranks have looked before one of them writes
        if world().is_main:
            run.open()
        try:
            return self._run(run, stored)
        except BaseException as error:
            if world().is_main:
                self._failed(run, error, nothing_done=stored is None and self._state.step == 0)
            raise
        finally:
            if self._timeline is not None:
                self._timeline.close()
            run.close()

    def _failed(self, run: RunDir, error: BaseException, *, nothing_done: bool) -> None:
        """Leave no directory behind after bad input; else say in it what happened.

        What this process spent is billed. A run that was refused before it went on, and one that
        is finished, stay what they were.
        """
        if nothing_done and isinstance(error, InputError):
            run.discard()
        elif isinstance(error, Exception):
            running = read_status(run.path).get("state") == "running"
            # The disk may be what failed; it is the error itself that must be heard.
            with contextlib.suppress(EkeError):
                if self._biller is not None:
                    self._biller.flush(self._state.step)
                    self._biller.charge("lost" if running else "startup", self._state.step)
                if running:
                    code = error.exit_code if isinstance(error, EkeError) else 1
                    step = self._state.step
                    run.write_status("failed", reason=str(error), step=step, exit_code=code)

    def _run(self, run: RunDir, stored: RunConfig | None) -> Result:
        wanted = self._given
        if stored is not None:
            wanted = continued(stored, wanted)
        _seed(wanted.run.seed + world().rank, wanted.run.deterministic)
        prepared = prepare(wanted, say=self._say)
        session = self._open_session(prepared, run)
        loader = self._loader(prepared, session.budget)
        stepper, saving = self._build(session, loader)
        with loader, saving:
            # Any other end was billed by the process that met it.
            crashed = stored is not None and read_status(run.path).get("state") == "running"
            found = saving.restore_newest()
            if stored is not None or (world().is_main and run.silent_starts):
                saving.account_for_lost_work(crashed=crashed)
            self._take_limits(session)
            resumed = self._state.step if found else None
            oversight = Oversight(session, saving)
            if world().is_main:
                run.write_status("running", step=self._state.step, pid=os.getpid())
            session.charge("startup")
            if found:
                session.timeline.event("resumed", step=self._state.step)
            move = self._loop(session, loader, stepper, saving, oversight)
            if move is None:
                return self._interrupted(session, saving, resumed)
            return self._finish(session, saving, oversight, move, resumed)

    # ------------------------------------------------------------------ before

    def _open_session(self, prepared: Prepared, run: RunDir) -> Session:
        budget = budget_of(prepared.config)
        biller = None
        if world().is_main:
            self._biller = biller = Biller(run.ledger, budget, born=self._born)
            if budget.joules is not None and biller.energy_source == "unknown":
                raise InputError(
                    "budget.energy cannot be held: this machine has no energy counter",
                    rule="joules come from NVML or RAPL, never from a guess",
                    fix="Use budget.wall_time or budget.cost instead",
                )
            self._check_data(prepared, run)
            # Only limits that are new: a run that has just passed one ends as it always does.
            if run.read_json("plan.json").get("limits") not in (None, budget.limits()):
                progress = progress_of(read_records(run.path / "metrics.jsonl"))
                check_limits(budget.limits(), {**biller.spent(), **progress})
            run.write_config(prepared.config)
            run.write_json("plan.json", plan_of(prepared, budget))
        trace = run.path / "trace.json" if world().is_main else None
        self._timeline = Timeline(trace, self._born)
        # Until a save is measured: 12 bytes a parameter at 200 MB/s.
        guess_s = prepared.shape.n_parameters * 12 / 200e6
        evals = [b.seconds or 0.0 for b in run.ledger.bills if b.what == "eval"] if biller else []
        return Session(
            prepared,
            budget,
            self._state,
            run,
            biller,
            self._observer,
            save_s=guess_s,
            eval_s=max(evals, default=0.0),
            timeline=self._timeline,
        )

    def _take_limits(self, session: Session) -> None:
        """Under other limits than the checkpoint's the decay that those asked for is over."""
        state, limits = self._state, session.budget.limits()
        if state.limits and state.limits != limits and world().is_main:
            session.run.ledger.note("limits", before=state.limits, now=limits, step=state.step)
        state.decay = decay_under(state.decay, state.limits, limits)
        state.limits = limits

    @staticmethod
    def _check_data(prepared: Prepared, run: RunDir) -> None:
        """Refuse other data than the run was started on, before a model of another vocabulary
        meets its checkpoint."""
        started_on = run.read_json("plan.json").get("corpus", {}).get("fingerprint")
        now = prepared.corpus["fingerprint"]
        if started_on not in (None, now):
            raise other_data(now, started_on)

    @staticmethod
    def _loader(prepared: Prepared, budget: Budget) -> DynamicLoader:
        config = prepared.config
        micro, workers, seed = (
            config.batch.micro_tokens,
            config.data.workers,
            config.batch.order_seed,
        )
        assert isinstance(micro, int)
        assert isinstance(workers, int)
        assert isinstance(seed, int)
        return DynamicLoader(
            prepared.train,
            micro_tokens=micro,
            per_step=config.batch.per_step,
            window=config.batch.window,
            num_workers=workers,
            seed=seed,
            pad_token_id=prepared.pad_id,
            # What is too long by data.max_length was dealt with per sample; the rest must train.
            overlength="solo",
            epochs=budget.epochs,
            packing=config.batch.packing,
            loss=config.batch.loss,
        )

    def _build(self, session: Session, loader: DynamicLoader) -> tuple[Stepper, Saving]:
        p, c = session.prepared, session.config
        optimizer = build_optimizer(p.model, c, p.device)
        every = c.checkpoint.keep_every
        keep = Keep(c.checkpoint.keep_last, None if every is None else Cadence.parse(every).steps)
        saver = Checkpointer(session.run.checkpoints, keep=keep, pool=c.checkpoint.pool)
        saver.attach(
            model=p.model, optimizer=optimizer, loader=loader, rng=True, extra={"run": self._state}
        )
        saving = Saving(session, saver)
        wrapped = distributed.wrap(p.model, p.device)
        return Stepper(session, wrapped, optimizer, saving.bill_stall), saving

    # ------------------------------------------------------------------ the loop

    def _loop(
        self,
        session: Session,
        loader: DynamicLoader,
        stepper: Stepper,
        saving: Saving,
        oversight: Oversight,
    ) -> Move | None:
        """Train until something ends the run; None when a signal did."""
        state = self._state
        if state.step == 0:
            oversight.check_one_step_fits()
            oversight.evaluate()
        oversight.pace()
        session.timeline.outside()
        for block in loader.blocks():
            session.gather("wait")
            cost, spent, finish = agreed(
                [stepper.cost(block), session.spent(), session.finish_cost()]
            )
            reserve = session.config.governor.reserve
            move = next_move(session.budget, spent, cost, finish, state.decay, reserve)
            if move.kind == "finish":
                # This block does not train. Under a larger limit it is the next one.
                loader.take_back()
                return move
            if move.kind == "decay":
                oversight.start_decay(spent, finish, move.reason, move.unit)
            outcome = stepper.step(
                block,
                cost,
                spent,
                signalled=self._signal is not None,
                save_due=saving.due(),
            )
            if outcome.shortages:
                memory.recover(session, loader, outcome.shortages, cost["flops"])
            elif not outcome.finite:
                self._recover(session, saving, outcome.loss, outcome.norm)
            elif state.step >= state.next_eval and state.decay is None:
                oversight.evaluate_and_govern(save_due=outcome.save_due)
            elif outcome.save_due:
                saving.save()
            session.gather("govern")
            session.timeline.turn(state.step)
            if outcome.signalled:
                return None
        return Move("finish", "every epoch is done", "epochs")

    @staticmethod
    def _recover(session: Session, saving: Saving, loss: float, norm: float) -> None:
        to_step = saving.recover(loss, norm)
        text = (
            f"The loss at step {session.state.step} is not finite: back to the weights of step "
            f"{to_step} at half the learning rate, past this step's data."
        )
        evidence = {"loss": str(loss), "grad_norm": str(norm), "to_step": to_step}
        session.record(Decision("rollback", session.state.step, text, evidence), by="guard")
        saving.save()

    # ------------------------------------------------------------------ after

    def _interrupted(self, session: Session, saving: Saving, resumed: int | None) -> Result:
        saving.save()
        saving.settle()
        step = self._state.step
        reason = f"{signal.Signals(self._signal or signal.SIGTERM).name} at step {step}"
        session.gather("govern")
        session.flush()
        if world().is_main:
            session.run.write_status("interrupted", reason=reason, step=step, exit_code=130)
        return Result(session.run.path, "interrupted", reason, step, 130, None, resumed)

    def _finish(
        self,
        session: Session,
        saving: Saving,
        oversight: Oversight,
        move: Move,
        resumed: int | None,
    ) -> Result:
        loss = oversight.last_evaluation(move.reason, move.unit)
        saving.save()
        saving.settle()
        step = self._state.step
        # Steps and epochs say how much to train: reaching them is being done, not being stopped.
        exit_code = 0 if move.unit in (None, "steps", "epochs") else 3
        if world().is_main:
            p, run = session.prepared, session.run
            write_model(p.model, p.tokenizer, run.path / "model")
            run.write_status(
                "finished",
                reason=move.reason,
                step=step,
                loss=loss,
                exit_code=exit_code,
                unit=move.unit,
                limits=session.budget.limits(),
            )
            if self._last_words is not None:
                self._last_words(run.path)
            session.flush()
            session.charge("finish")
        return Result(session.run.path, "finished", move.reason, step, exit_code, loss, resumed)

    # ------------------------------------------------------------------ small things

    def _say(self, text: str) -> None:
        if world().is_main:
            self._observer({"kind": "say", "text": text})

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn the first SIGTERM, SIGINT or SIGHUP into a checkpoint after the step under way."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def remember(number: int, _: Any) -> None:
            if self._signal is not None:
                raise KeyboardInterrupt
            self._signal = number
            # Not through the display: what was interrupted may be printing.
            name = signal.Signals(number).name
            text = f"{name}: the run saves and ends after the next step (again: at once)\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())

        wanted = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to go on
            wanted.append(signal.SIGHUP)
        before = {s: signal.signal(s, remember) for s in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _seed(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - code that a user brings may draw from it
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
