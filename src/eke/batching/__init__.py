"""Full batches, aligned ranks, nothing lost: micro-batches formed when lengths are known."""

from eke.batching.batch import Block, MicroBatch
from eke.batching.loader import DynamicLoader, LoaderStats
from eke.batching.ranks import Ranks

__all__ = ["Block", "DynamicLoader", "LoaderStats", "MicroBatch", "Ranks"]
