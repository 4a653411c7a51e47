"""Checks for parts that users write themselves: call them in your own tests."""

from eke.testing.provider import assert_provider
from eke.testing.resumable import assert_resumable

__all__ = ["assert_provider", "assert_resumable"]
