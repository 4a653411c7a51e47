"""Is another unit of compute worth it? The stopping rule, its guards, and their replay."""

from eke.governor.bigram import Bigram, fit_bigram
from eke.governor.governor import ACTIONS, Governor
from eke.governor.pacing import Pace, eval_interval
from eke.governor.records import Evaluation, Event, EventKind, Rule
from eke.governor.replay import ReplayReport
from eke.governor.rule import decide

__all__ = [
    "ACTIONS",
    "Bigram",
    "Evaluation",
    "Event",
    "EventKind",
    "Governor",
    "Pace",
    "ReplayReport",
    "Rule",
    "decide",
    "eval_interval",
    "fit_bigram",
]
