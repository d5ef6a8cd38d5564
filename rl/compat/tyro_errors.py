"""Errors of tyro's command line as events, which hold what the printed errors say."""

from tyro import _errors as errors

__all__ = ["errors"]
