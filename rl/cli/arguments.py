"""Command line of a program: the name of a config and dotted overrides, parsed and validated."""

import dataclasses
import importlib
import inspect
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import tyro
from torchtitan.config import ConfigManager

from rl.cli.help import (
    SHIPPED,
    all_help,
    asks_for_help,
    check_known,
    check_name,
    config_help,
    is_common,
    show_help,
    take_name,
)
from rl.compat.tyro_errors import errors
from rl.config import RLConfig, RunConfig, ServeConfig
from rl.config.algorithm import ALGORITHMS
from rl.config.frozen import read_frozen
from rl.config.other_names import OTHER_NAMES
from rl.config.users_code import users_code, users_error
from rl.errors import ConfigError, nearest, require, require_value, shown
from rl.types.rules import range_text
from rl.validation import validate
from rl.validation.values import (
    ConfigValue,
    choices_of,
    kinds_text,
    validate_attributes,
    validate_types,
    value_of,
    values,
)

RULES = tyro.constructors.ConstructorRegistry()
ConfigManager.register_tyro_rules(RULES)
LARGE = 10_000
TRUTH = {"True": True, "true": True, "False": False, "false": False}
COPIES = ("critic.", "reference.", "roles.")
"""Sections with fields of the trainer. Their fields need more of their names."""


def parse_config(
    arguments: Sequence[str], *, program: str, serves: bool = False
) -> tuple[str, RunConfig]:
    """Return the config's name and the resolved config; that of a server only if ``serves``.

    Raises ConfigError. ``--help`` prints the common fields and exits, ``--help-all`` all fields.
    """
    show_help(arguments, program)
    name, config = read_config(arguments, program=program, serves=serves)
    validate(config)
    return name, config


def read_config(
    arguments: Sequence[str], *, program: str, serves: bool = False
) -> tuple[str, RunConfig]:
    """Return the name and the config that ``arguments`` describe, like :func:`parse_config`, but
    without the checks of ``rl.validation``.
    """
    named, overrides = take_name(arguments)
    check_name(named, program)
    assert named is not None
    name, base = load_config(named)
    if asks_for_help(overrides):
        if "--help-all" in overrides:
            print(all_help(program, named, all_fields(base)))
        else:
            print(config_help(program, named, common_fields(base)))
        raise SystemExit(0)
    is_known = serves or not isinstance(base, ServeConfig)
    fix = f"run: python -m rl.serve --config {named}"
    require(is_known, f"--config {named} is of a server", field=f"--config {named}", fix=fix)
    if isinstance(base, RLConfig):
        overrides = _choose_algorithm(base, overrides)
    known = _names(base)
    # the chosen class has fields of its own
    chosen = {argument.partition(":")[0].replace("-", "_") for argument in overrides}
    overrides = [_full_argument(base, argument, known, chosen) for argument in overrides]
    overrides = _as_flags(base, overrides)
    try:
        with errors.on_parse_error(partial(_refuse, base, overrides)):
            config = _override(base, overrides, f"{program} --config {name}")
    except ConfigError:
        raise
    except ValueError as error:  # a torchtitan dataclass refused its values
        raise ConfigError(str(error)) from error
    except Exception as error:
        validate_types(base)
        raise users_error(f"--config {name}", error) from error
    return name, config


def _override(config: RunConfig, overrides: list[str], program: str) -> RunConfig:
    """Return ``config`` with the values of ``overrides``. tyro gets those fields of the root alone
    that the words name, since all of them take it up to ten times as long.
    """
    hints = get_type_hints(type(config), include_extras=True)
    words = {re.split("[.:]", _field_of(word))[0].removeprefix("no_") for word in overrides}
    named = sorted(words & {*hints})
    part = dataclasses.make_dataclass("Overrides", [(name, hints[name]) for name in named])
    parsed = tyro.cli(
        part,
        default=part(*(getattr(config, name) for name in named)),
        args=overrides,
        prog=program,
        registry=RULES,
        config=(tyro.conf.CascadeSubcommandArgs,),  # any field may follow a chosen part
    )
    return dataclasses.replace(config, **vars(parsed))


def _choose_algorithm(config: RLConfig, overrides: list[str]) -> list[str]:
    """Replace the algorithm of ``config`` by that of ``--algorithm NAME``, if given. Return the
    other arguments.
    """
    name, others = take_name(overrides, "--algorithm")
    if name is not None:
        hint = nearest(name, ALGORITHMS)
        allowed = ", ".join(ALGORITHMS)
        require(name in ALGORITHMS, f"--algorithm is {name!r}; {hint}allowed are {allowed}")
        config.algorithm = ALGORITHMS[name]()
    return others


def _refuse(config: RunConfig, arguments: list[str], event: errors.ParseErrorEvent) -> None:
    """Raise the error that tyro found as ConfigError, with the valid words nearest to a refused
    word.
    """
    argument = getattr(event, "argument", None)
    # a part of a config has a name only in the exception
    name = argument.display_name() if argument else getattr(sys.exception(), "arg", "")
    match event:
        case errors.InvalidChoice():
            choices = sorted(event.choices)
            fix = f"{nearest(event.value, choices)}allowed are {', '.join(choices)}"
            raise ConfigError(f"{name} is {event.value!r}", field=name, fix=fix)
        case errors.InstantiationFailure():
            options = [_field_of(word) for word in arguments]
            for value in values(config):
                if value.name == _field_of(name):
                    at = options.index(value.name)
                    text = [*arguments[at].split("=", 1), *arguments[at + 1 :]][1]
                    require_value(False, f"--{value.name}", text, kinds_text(value.hint))
            raise ConfigError(event.message, field=name)
        case errors.BadValue():
            raise ConfigError(f"{name} needs a value", field=name)
        case errors.SubcommandConflict():
            fix = f"give it before {event.trigger_flag}, which is of {event.already_selected}"
            raise ConfigError("comes too late", field=event.attempted, fix=fix)
        case errors.UnrecognizedArgs():
            option = event.tokens[0].partition("=")[0]
            known = [f"--{field}" for field in _names(config)]
            for value in values(config):  # kinds of parts, such as trainer.float8:linear
                section = value.name.replace("_", "-")
                known += (f"{section}:{kind}" for kind in _choices(value.hint))
            fix = f"{nearest(option, known)}a field is given as --FIELD VALUE"
            raise ConfigError("there is no such option", field=option, fix=fix)


def _choices(hint: Any) -> Iterator[str]:
    for argument in get_args(hint):
        is_choice = isinstance(argument, type(tyro.conf.subcommand()))
        yield from [argument.name] if is_choice else _choices(argument)


def load_config(name: str) -> tuple[str, RunConfig]:
    """Return the config of the given name, without overrides, and the name of the run it makes.

    Raises ConfigError if no config has that name, or if the user's code or file that holds it is
    broken.
    """
    if name.endswith(".json"):
        return read_frozen(Path(name))
    function = find_config(name)
    with users_code(f"--config {name}"):
        config = function()
    require(
        isinstance(config, RunConfig),
        f"--config {name}: {function.__name__} in {inspect.getfile(function)} returned "
        f"{shown(config)}; it must return a config such as RLConfig",
    )
    validate_attributes(config)  # an override makes new parts, which have the fields alone
    return name, config


def find_config(name: str) -> Callable[[], RunConfig]:
    """Return the function that makes config ``name``.

    Raises ConfigError, which lists the nearest names and all names, if no such config exists.
    """
    if "." in name:
        module_name, _, function = name.rpartition(".")
        module = _import(module_name, name)
        named = getattr(module, function, None)
        if inspect.isfunction(named) and "return" not in named.__annotations__:
            return named
        known = config_functions(module)
    else:
        known = shipped_configs()
        function = name
    check_known(name, function, known)
    return known[function]


@cache
def shipped_configs() -> dict[str, Callable[[], RunConfig]]:
    """Return every config function of Tiller's own ``configs`` folder, by name.

    The modules are loaded by path, because another package may be named ``configs`` too.
    """
    package = ModuleType("tiller_configs")
    package.__path__ = [str(SHIPPED)]  # for their relative imports
    sys.modules[package.__name__] = package
    functions: dict[str, Callable[[], RunConfig]] = {}
    for path in sorted(SHIPPED.glob("[!_]*.py")):
        spec = spec_from_file_location(f"{package.__name__}.{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        functions |= config_functions(module)
    return functions


def config_functions(module: ModuleType) -> dict[str, Callable[[], RunConfig]]:
    """Return the public functions that ``module`` defines and annotates as returning a config."""
    kinds = {subclass.__name__: subclass for subclass in _kinds(RunConfig)}
    functions: dict[str, Callable[[], RunConfig]] = {}
    for name, function in inspect.getmembers(module, inspect.isfunction):
        kind = function.__annotations__.get("return")
        if isinstance(kind, str):  # a module with postponed annotations
            kind = kinds.get(kind.rpartition(".")[2])
        returns_config = isinstance(kind, type) and issubclass(kind, RunConfig)
        if returns_config and function.__module__ == module.__name__ and not name.startswith("_"):
            functions[name] = function
    return functions


def _kinds(kind: type[RunConfig]) -> Iterator[type[RunConfig]]:
    """Yield all subclasses of ``kind``."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _kinds(subclass)


def _import(module_name: str, name: str) -> ModuleType:
    with users_code(f"--config {name}"):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and f"{module_name}.".startswith(f"{error.name}."):
                problem = f"cannot import {module_name} ({error})"
                fix = "is its folder on PYTHONPATH?"
                raise ConfigError(problem, field=f"--config {name}", fix=fix) from error
            raise


def all_fields(config: RunConfig) -> dict[str, tuple[str, str, str]]:
    """Return default, range and the first sentence of the docstring of the fields of a config, by
    name.
    """
    rows = {}
    for value in values(config):
        content = value.content
        if not isinstance(content, bool | int | float | str | None):
            continue
        if isinstance(content, bool):
            default = "(on)" if content else "(off)"
        elif isinstance(content, str):
            default = shlex.quote(content if len(content) <= 24 else f"{content[:23]}…")
        else:
            default = f"{content:g}" if isinstance(content, float) else str(content)
        paragraph = " ".join(value.docstring.partition("\n\n")[0].split())
        sentence = re.split(r"(?<=[.:]) ", paragraph)[0]
        rows[value.name] = (default, _limits_text(value), sentence)
    return rows


def common_fields(config: RunConfig) -> dict[str, tuple[str, str, str]]:
    """Return default, range and text of the common fields of a config, by name."""
    return {name: row for name, row in all_fields(config).items() if is_common(name)}


def _limits_text(value: ConfigValue) -> str:
    """Return the range of a field as text. Omit an upper bound that is only a sanity check."""
    bounds = value.bounds
    if bounds is None:
        # typing caches equal types, so the order of choices depends on what was imported first
        return " | ".join(sorted(map(str, choices_of(value.hint))))
    if bounds.most < LARGE:
        return range_text(bounds)
    also = "".join(f" or {other:,}" for other in bounds.also)
    least = f"{'above' if bounds.above else 'at least'} {bounds.least:,}"
    return f"{least}{also}" if bounds.least > -LARGE else ""


def _names(config: RunConfig) -> list[str]:
    """Return the full names of all values of a config."""
    return [value.name for value in values(config) if value.name]


def _full_argument(config: RunConfig, argument: str, known: list[str], chosen: set[str]) -> str:
    written, equals, value = argument.removeprefix("--").partition("=")
    name = _field_of(argument)
    if not argument.startswith("--"):
        require(not equals or name not in OTHER_NAMES, _other_name(written))
        return argument
    positive = re.sub(r"(^|\.)no_", r"\1", name)  # --no-flag negates
    section = positive.rpartition(".")[0]
    if positive in known or (
        section in known
        and (section in chosen or not dataclasses.is_dataclass(value_of(config, section)))
    ):
        return argument  # tyro checks an entry of a field without declared fields, such as a dict
    require(name not in OTHER_NAMES, _other_name(f"--{written}"))
    last = positive.rpartition(".")[2]
    fields = [name for name in known if name.endswith(f".{positive}")] or [
        name for name in known if name.startswith(f"{section}.") and name.endswith(f".{last}")
    ]
    fields = [name for name in fields if not name.startswith(COPIES)] or fields
    if len(fields) == 1:
        parent, _, last = fields[0].rpartition(".")
        negation = "no_" if name != positive else ""
        return f"--{parent}.{negation}{last}{equals}{value}"
    ends = ", ".join(f"--{name}" for name in fields)
    require(not fields, f"--{written} stands for several fields; give one of {ends}")
    raise _unknown_field(positive, known)


def _field_of(argument: str) -> str:
    """Return the name of the field that ``--FIELD`` or ``--FIELD=VALUE`` gives."""
    return argument.partition("=")[0].removeprefix("--").replace("-", "_")


def _as_flags(config: RunConfig, arguments: list[str]) -> list[str]:
    """Replace ``--FLAG True`` by ``--FLAG``, and ``--FLAG False`` by ``--no-FLAG``."""
    flags = {value.name for value in values(config) if isinstance(value.content, bool)}
    words = list[str]()
    for argument in arguments:
        is_flag = argument.startswith("--") and _field_of(argument) in flags
        words += argument.split("=", 1) if is_flag else [argument]
        field = _field_of(words[-2]) if len(words) > 1 else ""
        # a word with a colon chooses a part, such as trainer.float8:linear
        if field in flags and not re.match("--|.*:", words[-1]):
            require_value(words[-1] in TRUTH, f"--{field}", words[-1], "True or False")
            section, dot, last = field.rpartition(".")
            words[-2:] = [f"--{section}{dot}{'' if TRUTH[words[-1]] else 'no_'}{last}"]
    return words


def _other_name(written: str) -> str:
    new = OTHER_NAMES.get(_field_of(written))
    return f"{written}: Tiller's name of this field is --{new}"


def _unknown_field(field: str, known: list[str]) -> ConfigError:
    section = field.rpartition(".")[0]
    while section and not any(name.startswith(f"{section}.") for name in known):
        section = section.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    inside = (name.removeprefix(prefix) for name in known if name.startswith(prefix))
    siblings = sorted({prefix + name.partition(".")[0] for name in inside})
    hint = nearest(field, known, prefix="--")
    place = f"All in {section or 'the config'}: "
    names = textwrap.fill(place + ", ".join(siblings), 100, break_on_hyphens=False)
    fix = f"{hint.rstrip()}\n{names}"
    return ConfigError("there is no such field", field=f"--{field}", fix=fix)
