"""The ground floor: limits, bills, the ledger, meters, and what the parts tell one another."""

from eke.budget.bill import ACTIVITIES, UNITS, Activity, Bill
from eke.budget.budget import PROGRESS_UNITS, SPENT_UNITS, Budget
from eke.budget.ledger import Ledger
from eke.budget.messages import Action, Alternative, Decision, Headroom, Interval, Offer

__all__ = [
    "ACTIVITIES",
    "PROGRESS_UNITS",
    "SPENT_UNITS",
    "UNITS",
    "Action",
    "Activity",
    "Alternative",
    "Bill",
    "Budget",
    "Decision",
    "Headroom",
    "Interval",
    "Ledger",
    "Offer",
]
