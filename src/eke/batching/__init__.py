"""Full batches, aligned ranks, nothing lost: micro-batches formed when lengths are known."""

from eke.batching.batch import Block, MicroBatch
from eke.batching.cost import CostModel, Load
from eke.batching.exchange import Alone, Exchange
from eke.batching.extra import Shape
from eke.batching.loader import DynamicLoader
from eke.batching.stats import LoaderStats

__all__ = [
    "Alone",
    "Block",
    "CostModel",
    "DynamicLoader",
    "Exchange",
    "Load",
    "LoaderStats",
    "MicroBatch",
    "Shape",
]
