"""The two ways a run ends early, each with its exit code."""

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


class ConfigError(ValueError):
    """The configuration or the input it names cannot work; raised before any process starts."""


class RunError(RuntimeError):
    """A run failed after it started; the message names the actor, rank and call."""
