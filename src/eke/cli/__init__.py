"""The command line. `main` is the entry point of the `eke` command."""

from eke.cli.app import main

__all__ = ["main"]
