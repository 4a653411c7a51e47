"""Checks for parts that users write themselves: call them in your own tests."""

from eke.testing.provider import assert_provider

__all__ = ["assert_provider"]
