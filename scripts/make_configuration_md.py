"""Write docs/configuration.md: every config field with its type, default, bounds, effect and
docstring. Write rl/cli/common_fields.json: what ``--help`` shows of the shipped configs.
"""

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchtitan.config import Configurable

import rl.algorithms
import rl.environments
import rl.tasks
import rl.trainers.algorithm
from rl.cli.arguments import common_fields, shipped_configs
from rl.cli.help import COMMON_FIELDS, digest, shipped_sources
from rl.config import PreferenceConfig, RewardModelConfig, RLConfig, ServeConfig, SFTConfig
from rl.types.rules import Bounds, Effect, Fixed, range_text, rule_of
from rl.validation.values import docstrings_of, fields_of

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
REQUIRED = object()
INTRODUCTION = """\
# Configuration

Every field of a config, by dataclass, starting with the configs of the trainers and of a server:
[RLConfig](#rlconfig), [SFTConfig](#sftconfig), [PreferenceConfig](#preferenceconfig),
[RewardModelConfig](#rewardmodelconfig) and [ServeConfig](#serveconfig). A field is set in a
config function or on the command line by its full name, for example `--rollout.max_tokens 512`.
A flag is set by `--quiet` or `--quiet True`, and taken back by `--no-quiet` or `--quiet False`.
Dataclasses of torchtitan are shown with torchtitan's own documentation. Fields of them that change
nothing in Tiller must keep their defaults.

Each entry gives the type, the default, the allowed range, and the effect of a change, which
`python -m rl.plan --diff` reports:

- *numerics*: changes what is computed.
- *performance*: changes only where and how fast; samples and gradients are the same up to rounding.
- *cosmetic*: changes neither.

This page is generated: edit the docstrings in the source, then run
`python scripts/make_configuration_md.py`.
"""


@dataclass
class Section:
    """A dataclass, and all places in a config that hold an instance of it."""

    kind: type
    places: dict[str, tuple[Any, Effect | None]] = field(default_factory=dict)
    """Default and effect by place, such as ``trainer.parallelism``; None without a default."""


def main() -> None:
    """Write the page, and the fields that the programs show with ``--help``."""
    PAGE.write_text(page())
    COMMON_FIELDS.write_text(common())
    print(f"wrote {PAGE} and {COMMON_FIELDS}")


def common() -> str:
    """Return the range of each common field, and its default in each shipped config, as JSON."""
    configs = {name: common_fields(make()) for name, make in shipped_configs().items()}
    ranges = {field: row[1] for fields in configs.values() for field, row in fields.items()}
    defaults = {
        name: [fields[field][0] if field in fields else None for field in ranges]
        for name, fields in configs.items()
    }
    sources = {path.name: digest(path) for path, _ in shipped_sources().values()}
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in defaults.items())
    head = f'"sources": {json.dumps(sources)},\n"ranges": {json.dumps(ranges, indent=1)}'
    return f'{{{head},\n"configs": {{\n{rows}\n}}}}\n'


def page() -> str:
    """Return the text of the page."""
    return "\n".join([INTRODUCTION, *map(_section_text, sections().values())])


def sections() -> dict[type, Section]:
    """Return the sections of the page, by dataclass."""
    for package in (rl.algorithms, rl.environments, rl.tasks):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    found: dict[type, Section] = {}
    for kind in (RLConfig, SFTConfig, PreferenceConfig, RewardModelConfig, ServeConfig):
        _collect(kind, "", None, None, found)
    return found


def _collect(
    kind: type, place: str, default: Any, effect: Effect | None, found: dict[type, Section]
) -> None:
    """Add ``kind``, its replacements, and the dataclasses of all their fields to ``found``."""
    for each in (*_bases(kind), kind, *_choices(kind)):
        section = found.setdefault(each, Section(each))
        section.places[place] = (default if isinstance(default, each) else None, effect)
        for name, hint in own_fields(each):
            content = _default(each, name, section.places[place][0])
            inner = rule_of(hint, Effect) or effect
            for part, suffix in dataclasses_in(hint):
                if part is not kind:  # a Mixture holds tasks again
                    full = f"{place}.{name}{suffix}".removeprefix(".")
                    _collect(part, full, _first(content), inner, found)


def _bases(kind: type) -> list[type]:
    """Return the dataclasses with fields that ``kind`` inherits from, the most general first."""
    bases = reversed(kind.__mro__[1:])
    return [base for base in bases if dataclasses.is_dataclass(base) and own_fields(base)]


def _parents(kind: type) -> list[type]:
    """Return the nearest dataclasses with fields that ``kind`` inherits from."""
    bases = [base for base in kind.__bases__ if dataclasses.is_dataclass(base)]
    return [each for base in bases for each in ([base] if own_fields(base) else _parents(base))]


def _choices(kind: type) -> list[type]:
    """Return Tiller's own subclasses of the config of an exchangeable part, in source order."""
    if not issubclass(kind, Configurable.Config):
        return []
    found = [each for child in kind.__subclasses__() for each in (child, *_choices(child))]
    shipped = [
        each for each in found if each.__module__.startswith("rl.") and each._owner.Config is each
    ]
    return sorted(
        dict.fromkeys(shipped), key=lambda each: (each.__module__, inspect.findsource(each)[1])
    )


def own_fields(kind: type) -> list[tuple[str, Any]]:
    """Return names and types of the fields that ``kind`` itself declares."""
    own = inspect.get_annotations(kind)
    return [(name, hint) for name, hint in fields_of(kind) if name in own]


def _default(kind: type, name: str, instance: Any) -> Any:
    if instance is not None:
        return getattr(instance, name)
    declared = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return REQUIRED if declared.default is MISSING else declared.default


def _first(content: Any) -> Any:
    """Return the first element of a list or dict (None if empty), or any other value itself."""
    if isinstance(content, (list, tuple, dict)):
        items = content.values() if isinstance(content, dict) else content
        return next(iter(items), None)
    return content


def dataclasses_in(hint: Any) -> Iterator[tuple[type, str]]:
    """Yield the dataclasses of a type, each with the suffix of the field's name that reaches it."""
    suffixes = {dict: ".NAME", list: ".N", tuple: ".N"}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint, ""
    for argument in get_args(hint):
        for kind, suffix in dataclasses_in(argument):
            yield kind, suffixes.get(get_origin(hint), "") + suffix


def _section_text(section: Section) -> str:
    kind = section.kind
    lines = [f"## {kind.__qualname__}", ""]
    places = [f"`{place}`" for place in section.places if place]
    if places:
        lines += [_wrapped(f"In {', '.join(places)}.{_origin(kind)}"), ""]
    text = _class_doc(kind)
    if text:
        lines += [_markdown(text), ""]
    if parents := _parents(kind):
        lines += [f"It also has the fields of {' and '.join(map(_link, parents))}.", ""]
    for name, hint in own_fields(kind):
        lines += [*_field_text(section, name, hint), ""]
    return "\n".join(lines)


def _origin(kind: type) -> str:
    titan = kind.__module__.startswith("torchtitan.")
    return f" From `{kind.__module__}`." if titan else ""


def _field_text(section: Section, name: str, hint: Any) -> list[str]:
    place = next(iter(section.places))
    title = f"- **`{f'{place}.{name}'.removeprefix('.')}`**"
    if fixed := rule_of(hint, Fixed):
        return [f"{title}: must be `{fixed.default!r}`: {fixed.fix}"]
    effects = [rule_of(hint, Effect) or effect for _, effect in section.places.values()]
    facts = [
        _type_text(inspect.get_annotations(section.kind, eval_str=True)[name]),
        *_default_texts(section, name, hint),
        *_bounds_texts(hint),
        *(f"*{effect}*" for effect in dict.fromkeys(effects) if effect),
    ]
    lines = [f"{title}: {'; '.join(facts)}"]
    text = docstrings_of(section.kind).get(name)
    return [*lines, "", textwrap.indent(_markdown(text), "  ")] if text else lines


def _type_text(hint: Any) -> str:
    kinds = list(dict.fromkeys(kind for kind, _ in dataclasses_in(hint)))
    if not kinds:
        return f"`{_type_name(hint)}`"
    choices = [each for each in _choices(kinds[0]) if not inspect.isabstract(each._owner)]
    links = [*map(_link, choices), *map(_link, kinds)]
    if choices:
        links[-1] = f"your own {links[-1]}"
    if NoneType in _members(hint):
        links.append("`None`")
    outer = get_origin(_plain(hint))
    before = {dict: "dict of ", list: "list of ", tuple: "tuple of "}.get(outer, "")
    return before + " or ".join(filter(None, [", ".join(links[:-1]), links[-1]]))


def _type_name(hint: Any) -> str:
    """Return a type as it is written in source, without metadata."""
    hint = _plain(hint)
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(_type_name, _members(hint))))
    if get_args(hint):
        inner = ", ".join(map(_type_name, get_args(hint)))
        return f"{get_origin(hint).__name__}[{inner}]"
    return "None" if hint is NoneType else getattr(hint, "__name__", str(hint))


def _plain(hint: Any) -> Any:
    return _plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def _members(hint: Any) -> list[Any]:
    hint = _plain(hint)
    union = get_origin(hint) in (Union, UnionType)
    return [member for part in get_args(hint) for member in _members(part)] if union else [hint]


def _default_texts(section: Section, name: str, hint: Any) -> list[str]:
    """Return the default at the first place, and those of other places that differ from it."""
    contents = {
        place: _shown_default(_default(section.kind, name, instance), hint)
        for place, (instance, _) in section.places.items()
    }
    first, *others = contents.items()
    differing = [f"in `{place}` {text}" for place, text in others if text != first[1]]
    return [", ".join([first[1], *differing])] if first[1] else []


def _shown_default(content: Any, hint: Any) -> str:
    if content is REQUIRED:
        return "required"
    if dataclasses.is_dataclass(content):
        kinds = [kind for kind, _ in dataclasses_in(hint)]
        exchangeable = len(_members(hint)) > 1 or any(_choices(kind) for kind in kinds)
        return f"default {_link(type(content))}" if exchangeable else ""
    if dataclasses.is_dataclass(_first(content)):
        return ""
    return f"default `{content!r}`"


def _bounds_texts(hint: Any) -> list[str]:
    bounds = rule_of(hint, Bounds)
    by_key = rule_of(hint, dict) or {}
    inner = get_args(_plain(hint))[-1] if get_origin(_plain(hint)) in (dict, list) else None
    of_elements = rule_of(inner, Bounds)
    return [
        *([range_text(bounds)] if bounds else []),
        *([f"each {range_text(of_elements)}"] if of_elements else []),
        *(f"`{key}` {range_text(limits)}" for key, limits in by_key.items()),
    ]


def _class_doc(kind: type) -> str:
    """Return the docstring of a dataclass, or that of the part that it configures.

    Only the first paragraph of a docstring of torchtitan is about the config.
    """
    owner = getattr(kind, "_owner", None)
    source = owner if owner is not None and owner.Config is kind else kind
    text = inspect.cleandoc(source.__dict__.get("__doc__") or "")
    if text.startswith(f"{source.__name__}("):  # written by dataclass
        return ""
    return text.partition("\n\n")[0] if kind.__module__.startswith("torchtitan.") else text


def _link(kind: type) -> str:
    return f"[{kind.__qualname__}](#{kind.__qualname__.replace('.', '').lower()})"


def _markdown(text: str) -> str:
    """Return a docstring as Markdown: without roles, and without signs that would mean markup."""
    text = re.sub(r":\w+:(`[^`]+`)", r"\1", text).replace("::\n", ":\n")
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    lines = [
        line if line.startswith("    ") else re.sub(r"(`+.*?`+)|([*<])", _escaped, line)
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def _escaped(match: re.Match[str]) -> str:
    return match[1] or f"\\{match[2]}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    main()
