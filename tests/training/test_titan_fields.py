"""Every field of torchtitan's dataclasses has rules, and all rules are of fields that exist."""

import dataclasses
from typing import get_args

import pytest
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig

from rl.rules import Bounds, Effect, rule_of
from rl.training.config import TrainerConfig
from rl.training.titan_fields import TITAN_FIELDS, titan_rules
from rl.validation.values import fields_of, is_number_field

FILE = "rl/training/titan_fields.py"


def torchtitan_classes(kind: type) -> set[type]:
    """Return torchtitan's dataclasses among the types of the fields of ``kind`` and below."""
    members = [part for _, hint in fields_of(kind) for part in parts_of(hint)]
    found = {each for each in members if dataclasses.is_dataclass(each)}
    return found.union(*map(torchtitan_classes, found))


def parts_of(hint) -> list[type]:
    inner = [part for argument in get_args(hint) for part in parts_of(argument)]
    return [hint, *inner] if isinstance(hint, type) else inner


CLASSES = sorted(torchtitan_classes(TrainerConfig), key=lambda kind: kind.__qualname__)


def test_all_classes_of_the_trainer_are_found():
    kinds = [kind for kind in TITAN_FIELDS if kind.__qualname__ != "ActivationCheckpointing.Config"]
    assert {*kinds} <= {*CLASSES}
    assert {*parts_of(ActivationCheckpointingConfig)} - {type(None)} <= {*CLASSES}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_every_field_of_torchtitans_dataclasses_has_an_effect(kind):
    fields = {field.name for field in dataclasses.fields(kind)}
    listed = titan_rules(kind)
    new = sorted(fields - listed.keys())
    gone = sorted(listed.keys() - fields)
    assert not new, f"torchtitan's {kind.__qualname__} has the fields {new}: list them in {FILE}"
    assert not gone, f"torchtitan's {kind.__qualname__} has no fields {gone}: remove from {FILE}"
    for name, hint in fields_of(kind):
        assert rule_of(hint, Effect), f"{kind.__qualname__}.{name} has no effect in {FILE}"
        bounded = not is_number_field(hint) or rule_of(hint, Bounds)
        assert bounded, f"{kind.__qualname__}.{name} has no bounds in {FILE}"
