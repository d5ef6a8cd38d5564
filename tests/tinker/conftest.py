"""One rank in pytest's own process."""

from tests.training.conftest import folder, lone_rank

__all__ = ["folder", "lone_rank"]
