"""Run benchmarks by name; without a name, all of them."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "checkpoint_save",
    "checkpoint_training",
    "checkpoint_restore",
    "checkpoint_integrity",
    "loop_throughput",
    "batching_efficiency",
    "batching_planner",
    "batching_throughput",
    "batching_robustness",
)


def main() -> None:
    for name in sys.argv[1:]:
        if name not in NAMES:
            sys.exit(f"error: no benchmark {name!r}; there are {', '.join(NAMES)}")
    for name in sys.argv[1:] or NAMES:
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
