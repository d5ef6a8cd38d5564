"""Fields in which two configs differ, each with its effect on a run."""

from dataclasses import dataclass

from rl.config import RunConfig
from rl.frozen import changed_fields, frozen
from rl.rules import Effect
from rl.validation.values import values


@dataclass(frozen=True, slots=True)
class Change:
    """A field in which two configs differ."""

    mark: Effect
    change: str
    """``field: old → new``."""


def changes(before: RunConfig, after: RunConfig) -> list[Change]:
    """Return the differences between two configs, those with an effect on numerics first."""
    effects = {value.name: value.effect for each in (before, after) for value in values(each)}
    found = [
        Change(_effect(text.partition(": ")[0], effects), text)
        for text in changed_fields(frozen(before), frozen(after))
    ]
    return sorted(found, key=lambda change: [*Effect].index(change.mark))


def _effect(name: str, effects: dict[str, Effect | None]) -> Effect:
    """Return the effect of a field, or of its section if only the frozen config has the field.

    A section that one of the configs lacks has the strongest effect of its fields.
    """
    while name and name not in effects:
        name = name.rpartition(".")[0]
    found = effects.get(name)
    if found is not None:
        return found
    prefix = f"{name}." if name else ""
    inside = {effect for field, effect in effects.items() if effect and field.startswith(prefix)}
    assert inside, f"{name} has no effect: declare one at the field"
    return min(inside, key=[*Effect].index)
