"""Every field of torchtitan's dataclasses acts by rules or keeps its default."""

import dataclasses
import inspect
from typing import get_args

import pytest
from torchtitan.config import TrainingConfig

from rl.rules import Bounds, Effect, Fixed, rule_of
from rl.training.config import TrainerConfig
from rl.training.titan_fields import HONOURED, INSTEAD
from rl.validation.values import fields_of, is_number_field

FILE = "rl/training/titan_fields.py"


def torchtitan_classes(kind: type) -> set[type]:
    """Return torchtitan's dataclasses among the types of the fields of ``kind`` and below, with
    their base classes.
    """
    members = [part for _, hint in fields_of(kind) for part in parts_of(hint)]
    found = {each for each in members if dataclasses.is_dataclass(each)}
    bases = {base for each in found for base in each.__mro__ if own_fields(base)}
    return (found | bases).union(*map(torchtitan_classes, found))


def parts_of(hint) -> list[type]:
    inner = [part for argument in get_args(hint) for part in parts_of(argument)]
    return [hint, *inner] if isinstance(hint, type) else inner


def own_fields(kind: type) -> set[str]:
    declared = inspect.get_annotations(kind).keys() if dataclasses.is_dataclass(kind) else set()
    return {field.name for field in dataclasses.fields(kind)} & declared if declared else set()


CLASSES = sorted(torchtitan_classes(TrainerConfig), key=lambda kind: kind.__qualname__)


def test_all_classes_of_the_table_and_all_names_of_other_fields_exist():
    assert {*HONOURED} <= {*CLASSES}
    assert {*INSTEAD} <= {name for kind in CLASSES for name in own_fields(kind)}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_every_field_of_torchtitans_dataclasses_has_an_effect_or_keeps_its_default(kind):
    gone = HONOURED.get(kind, {}).keys() - {field.name for field in dataclasses.fields(kind)}
    assert not gone, f"torchtitan's {kind.__qualname__} has no fields {gone}: remove from {FILE}"
    for name, hint in fields_of(kind):
        assert rule_of(hint, Effect), f"{kind.__qualname__}.{name} has no effect in {FILE}"
        bounded = not is_number_field(hint) or rule_of(hint, Bounds) or rule_of(hint, Fixed)
        assert bounded, f"{kind.__qualname__}.{name} has no bounds in {FILE}"


def test_a_field_that_torchtitan_adds_keeps_its_default():
    @dataclasses.dataclass
    class Grown(TrainingConfig):
        depth: int = 3

    Grown.__module__ = TrainingConfig.__module__
    hints = dict(fields_of(Grown))
    assert rule_of(hints["depth"], Fixed).default == 3
    assert rule_of(hints["max_norm"], Fixed) is None
