"""Every field of torchtitan's dataclasses acts by rules or keeps its default."""

import dataclasses

import pytest
from torchtitan.config import TrainingConfig

from rl.training.titan_fields import HONOURED, INSTEAD
from rl.types.rules import Bounds, Effect, Fixed, rule_of
from rl.validation.values import _members, fields_of

FILE = "rl/training/titan_fields.py"


@pytest.mark.parametrize("kind", HONOURED, ids=lambda kind: kind.__qualname__)
def test_every_rule_is_of_a_field_and_every_number_has_bounds(kind):
    hints = dict(fields_of(kind))
    gone = HONOURED[kind].keys() - hints.keys()
    assert not gone, f"torchtitan's {kind.__qualname__} has no fields {gone}: remove from {FILE}"
    for name, hint in hints.items():
        assert rule_of(hint, Effect), f"{kind.__qualname__}.{name} has no effect in {FILE}"
        is_number = not {int, float}.isdisjoint(_members(hint))
        bounded = not is_number or rule_of(hint, Bounds) or rule_of(hint, Fixed)
        assert bounded, f"{kind.__qualname__}.{name} has no bounds in {FILE}"


def test_the_fields_that_are_replaced_exist():
    assert {*INSTEAD} <= {name for kind in HONOURED for name, _ in fields_of(kind)}


def test_a_field_that_torchtitan_adds_keeps_its_default():
    @dataclasses.dataclass
    class Grown(TrainingConfig):
        depth: int = 3

    Grown.__module__ = TrainingConfig.__module__
    hints = dict(fields_of(Grown))
    assert rule_of(hints["depth"], Fixed).default == 3
    assert rule_of(hints["max_norm"], Fixed) is None
