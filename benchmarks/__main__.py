"""Run benchmarks by name; without a name, all of them."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks

NAMES = sorted(
    m.name
    for m in pkgutil.iter_modules(benchmarks.__path__)
    if m.name not in ("harness", "__main__")
)


def main() -> None:
    wanted = sys.argv[1:] or NAMES
    for name in wanted:
        if name not in NAMES:
            sys.exit(f"error: no benchmark {name!r}; there are {', '.join(NAMES)}")
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
