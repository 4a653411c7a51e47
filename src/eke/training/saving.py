"""Saving, and going back: cadence, the newest checkpoint, what a crash undid, rollback.

A rollback takes back weights and optimizer state only. Step counts, data position and logs go
on, so that nothing is trained twice and a crash right after it is like any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from eke.budget import Bill
from eke.budget.jsonl import Record, read_records
from eke.budget.meters import process_age_s
from eke.budget.units import parse_duration
from eke.checkpoint import Checkpointer, CorruptCheckpoint, Ticket
from eke.distributed import world
from eke.errors import EkeError, InputError
from eke.training.cadence import WHY, Interval, auto_interval
from eke.training.config import Cadence
from eke.training.session import Session, agreed

LOGGED_AT = 1.5
"""A new interval is logged when it differs from the last one logged by this factor."""


def first_lost(records: Sequence[Record], saved_at: int, step: int, end: int) -> int:
    """The byte of the ledger from which on bills are for work that a resume undid; else `end`.

    After the position that a save remembered come the bill of the save itself, and of what was
    done at that step without training further: these stand.

    Args:
        records: the whole ledger.
        saved_at: its length when the restored checkpoint was saved.
        step: the restored step.
        end: its length now.
    """
    for record in records:
        bill = record.value
        if record.offset < saved_at or bill.get("kind") != "bill":
            continue
        if bill["what"] in ("train", "padding", "eval") or bill["step"] > step:
            return record.offset
    return end


def other_data(now: str, before: str) -> InputError:
    """The error of a resume on other data."""
    return InputError(
        "the training data is not what this run was started on",
        value=now,
        rule=f"the run saw {before}",
        fix="Bring the data back as it was, or start a new run (--set run.name=...)",
    )


class Saving:
    """Owns the checkpointer of a run. Closed as a context manager."""

    def __init__(self, session: Session, saver: Checkpointer) -> None:
        self._session, self._saver = session, saver
        self._last = time.perf_counter()
        self._ticket: Ticket | None = None
        self._learned: Ticket | None = None
        self._billed_s = self._logged_s = 0.0

    def due(self) -> bool:
        """Whether a save is due once the step under way is done. Only rank 0's answer counts."""
        s = self._session
        self._learn()
        every = s.config.checkpoint.every
        since = time.perf_counter() - self._last
        if every == "auto":
            return since >= self._interval().seconds
        cadence = Cadence.parse(every)
        if cadence.steps is not None:
            return (s.state.step + 1) % cadence.steps == 0
        return since >= (cadence.seconds or 0.0)

    def _interval(self) -> Interval:
        """What `auto` makes of the saves so far; logged when it changes, so that a reader sees
        why."""
        s = self._session
        found = auto_interval(
            # Until one is measured, all of a save is taken for its cost.
            s.save_s if s.stall_s is None else s.stall_s,
            parse_duration(s.config.checkpoint.mtbf),
            background_s=s.slow_down.background_s,
            save_s=s.save_s,
        )
        low, high = self._logged_s / LOGGED_AT, self._logged_s * LOGGED_AT
        if s.stall_s is not None and not low <= found.seconds <= high:
            self._logged_s = found.seconds
            record = {"kind": "cadence", "step": s.state.step, **found.to_json()}
            s.log("decisions", {**record, "reason": WHY[found.why]})
        return found

    def _learn(self) -> None:
        """Take note of what the last save took, once it is over."""
        ticket = self._ticket
        if ticket is None or not ticket.final or ticket is self._learned:
            return
        self._learned = ticket
        self._session.slow_down.ended()
        if ticket.state == "committed":
            self._session.stall_s = ticket.stall_s
            self._session.save_s = ticket.seconds["committed"]

    def save(self) -> None:
        """Start to save this step, unless it is saved or being saved already.

        Training goes on at once: the bill of a save is for what it waits here and before later
        updates (`bill_stall`), not for what is done in the background.
        """
        s = self._session
        ticket = self._ticket
        under_way = ticket is not None and ticket.step == s.state.step and ticket.state != "failed"
        if agreed(under_way or s.state.step in self._saver.steps()):
            return
        s.gather("govern")
        s.flush()
        # Every rank's state is the same, so that it restores on any number of ranks.
        s.state.offsets = agreed(s.run.offsets() if world().is_main else None)
        self._saver.protect({b for b in (s.state.best_step,) if b is not None})
        s.timeline.gather()
        self._ticket = self._saver.save(s.state.step)
        s.timeline.saving(self._ticket)
        s.slow_down.began()
        s.charge("checkpoint")
        self._billed_s = self._saver.stall_s
        self._last = time.perf_counter()

    def bill_stall(self) -> None:
        """Bill what an update has waited for a save to the save, not to the step."""
        stall_s, self._billed_s = self._saver.stall_s - self._billed_s, self._saver.stall_s
        if self._session.biller is not None and stall_s > 0:
            self._session.biller.carve("checkpoint", self._session.state.step, stall_s)

    def settle(self) -> None:
        """Wait until everything is committed.

        Raises:
            SaveError: a save failed.
        """
        s = self._session
        if self._ticket is None or self._ticket.final:
            self._saver.wait()
        else:
            s.gather("govern")
            self._saver.wait()
            s.charge("checkpoint")
        s.timeline.settled()
        self._learn()

    def close(self) -> None:
        """Wait for what is being saved, and let the checkpointer go.

        Raises:
            SaveError: a save failed.
        """
        self._saver.close()

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._saver.__exit__(kind, value, trace)

    # ------------------------------------------------------------------ going back

    def restore_newest(self) -> bool:
        """Load the newest checkpoint; False when there is none.

        Raises:
            InputError: the data is not what the checkpoint was trained on.
        """
        s = self._session
        fingerprint = s.prepared.corpus["fingerprint"]
        try:
            report = self._saver.restore()
        except CorruptCheckpoint as error:
            raise EkeError(
                f"the newest checkpoint is damaged: {error.what}",
                fix=f"Move {error.path} away, and the same command goes on from the one before it",
            ) from error
        if report is not None and s.state.corpus != fingerprint:
            raise other_data(fingerprint, s.state.corpus)
        s.state.corpus = fingerprint
        return report is not None

    def back_to(self, step: int, *, only: tuple[str, ...] = ("model", "optimizer")) -> None:
        """Take the weights (and optimizer state) of an earlier step; all else goes on.

        All of it is checked first: a damaged checkpoint changes nothing.
        """
        self._saver.restore(step=step, only=only, check_first=True)

    def newest(self) -> int | None:
        """The newest saved step, once it is committed."""
        self.settle()
        return agreed(max(self._saver.steps(), default=None))  # type: ignore[no-any-return]

    def recover(self, loss: float, norm: float) -> int:
        """After a step that was not finite: the last checkpoint's weights at half the rate.

        Returns the step whose weights were taken.

        Raises:
            EkeError: it happened before, or nothing was saved yet.
        """
        state = self._session.state
        state.bad_steps += 1
        step = self.newest()
        if state.bad_steps > 1 or step is None:
            why = "nothing was saved yet to go back to"
            if step is not None:
                why = "once, a run goes back to its last checkpoint at half the learning rate"
            raise EkeError(
                f"the loss is not finite at step {state.step}",
                value=f"loss {loss}, gradient norm {norm}",
                rule=why,
                fix="Lower optimizer.lr, look at the data of this step, and start a new run",
            )
        self.back_to(step)
        state.lr_scale *= 0.5
        return step

    def account_for_lost_work(self, *, crashed: bool) -> None:
        """Mark in the logs what was done after the restored checkpoint, on rank 0.

        What was under way when a process was killed was never billed. It is at most one activity,
        so it is charged like the dearest there was: limits hold over any number of crashes.
        """
        s = self._session
        if not world().is_main:
            return
        offsets = dict(s.state.offsets) or {"ledger": 0, "metrics": 0, "decisions": 0}
        records = read_records(s.run.path / "ledger.jsonl")
        offsets["ledger"] = first_lost(
            records, offsets["ledger"], s.state.step, s.run.ledger.offset
        )
        s.run.rewind(offsets, s.state.step)
        starts = [b.seconds or 0.0 for b in s.run.ledger.bills if b.what == "startup"]
        for _ in range(s.run.silent_starts):
            # Killed before its first bill: charged like the dearest start there was.
            age_s = max(starts, default=process_age_s())
            s.run.ledger.add(
                Bill(who="training", what="lost", step=s.state.step, seconds=age_s, measured=False)
            )
        if crashed:
            bills = [b for b in s.run.ledger.bills if b.what != "startup"]
            seconds = max((b.seconds or 0.0 for b in bills), default=0.0)
            lost = Bill(
                who="training",
                what="lost",
                step=s.state.step,
                flops=max((b.flops or 0.0 for b in bills), default=0.0),
                seconds=seconds,
                # Unknown only where it was unknown before: else the total would be, from here on.
                joules=max((b.joules for b in bills if b.joules is not None), default=None),
                money=s.with_money({"seconds": seconds}).get("money"),
                measured=False,
            )
            s.run.ledger.add(lost)
        assert s.biller is not None
        s.biller.recount()
