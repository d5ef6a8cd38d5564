"""Checks of a host, of a config and its input, and of a run folder. They start no process.

A check is a function that yields findings.
"""
