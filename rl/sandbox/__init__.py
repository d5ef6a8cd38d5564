"""Execution of untrusted Python programs: no network, no files but their own, limits."""
