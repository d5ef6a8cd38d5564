"""Conversion of a config to JSON, and back."""

import ast
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torchtitan.config import Configurable

from rl.config import RunConfig
from rl.config.users_code import users_code
from rl.errors import ConfigError, require, shown
from rl.model.hub import Snapshot
from rl.types.rules import defaults_of

A_RUNS_FILE = "it must be the config.json of a run"
UNCHANGED = ("resume", "quiet", "output_dir")
"""Fields that may differ between attempts without a note."""


def frozen(value: Any) -> Any:
    """Return ``value`` as JSON data. Configs of runs and of parts carry their ``type``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: frozen(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if not isinstance(value, Configurable.Config | RunConfig):
            return fields
        return {"type": f"{type(value).__module__}.{type(value).__qualname__}", **fields}
    if isinstance(value, dict):
        return {str(k): frozen(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(v) for v in value]
    if isinstance(value, Snapshot):
        return value.name
    return value if isinstance(value, str | int | float | bool | None) else {"repr": repr(value)}


def thawed(data: Any, kind: Any = RunConfig, name: str = "config") -> Any:
    """Return the value of type ``kind`` from the data that ``frozen`` returned.

    Raises ConfigError, naming the field, for values without a form in JSON and for data of another
    version of the code.
    """
    if isinstance(data, dict) and data.keys() == {"repr"}:
        raise ConfigError(
            f"{name}: {data['repr']} cannot be read from a frozen config: let a config function "
            "make it"
        )
    require(
        kind is not RunConfig or (isinstance(data, dict) and "type" in data),
        f"{name} has no type, which names the kind of config, such as rl.config.rl.RLConfig",
    )
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    bases = Configurable.Config | RunConfig
    parts = tuple(part for part in kinds if isinstance(part, type) and issubclass(part, bases))
    if isinstance(data, dict) and "type" in data and parts:
        kind = find_part(data["type"], parts, name)
        data = {field: value for field, value in data.items() if field != "type"}
    elif len(kinds) > 1:
        kind = next((member for member in kinds if _takes(member, data)), Any)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _thawed_dataclass(data, kind, name)
    arguments = get_args(kind)
    if isinstance(data, list):
        inner = arguments[0] if arguments else Any
        items = [thawed(item, inner, f"{name}.{index}") for index, item in enumerate(data)]
        return tuple(items) if get_origin(kind) is tuple else items
    if isinstance(data, dict):
        inner = arguments[1] if len(arguments) > 1 else Any
        return {key: thawed(item, inner, f"{name}.{key}") for key, item in data.items()}
    return data


def _thawed_dataclass(data: Any, kind: type, name: str) -> Any:
    require(
        isinstance(data, dict),
        f"{name} is {data!r}; it must be an object with the fields of {kind.__qualname__}",
    )
    types = get_type_hints(kind)
    unknown = sorted(data.keys() - {field.name for field in dataclasses.fields(kind)})
    require(
        not unknown,
        f"{name} has the fields {unknown}, which {kind.__qualname__} has not: another version's?",
    )
    values = {key: thawed(value, types[key], f"{name}.{key}") for key, value in data.items()}
    with users_code(f"{name} cannot be made"):
        return kind(**values)


def find_part(path: str, kinds: tuple[type, ...], name: str) -> type:
    """Return the Config class of the given ``path``, such as
    ``rl.tasks.copy_digits.CopyDigits.Config``.

    A module is imported only if its source defines that class. Raises ConfigError, naming the
    field, unless the class exists and is one of ``kinds``, or a subclass.
    """
    names = path.split(".") if isinstance(path, str) else []
    names = names if all(word.isidentifier() for word in names) else []
    module_name, spec = _module_of(names)
    inner = names[module_name.count(".") + 1 :] if spec else []
    with users_code(f"{name}: {path}"):
        known = bool(inner) and (module_name in sys.modules or _defines(spec, inner))
        require(known, f"{name}: there is no config class {path!r}; is its folder on PYTHONPATH?")
        part: Any = importlib.import_module(module_name)
    for attribute in inner:
        part = getattr(part, attribute, None)
    allowed = " or ".join(kind.__qualname__ for kind in kinds)
    require(
        isinstance(part, type) and issubclass(part, kinds),
        f"{name}.type is {path!r}; it must name a {allowed}, or a subclass in a module on "
        "PYTHONPATH",
    )
    return part


def _module_of(names: Sequence[str]) -> tuple[str, ModuleSpec | None]:
    """Return the longest prefix of ``names`` that is a module, and its spec. Import no package."""
    module = ""
    spec = None
    for name in names:
        longer = f"{module}.{name}" if module else name
        folders = spec.submodule_search_locations if spec else None
        if spec is not None and folders is None:
            break
        finders = (finder.find_spec(longer, folders, None) for finder in sys.meta_path)
        following = next(filter(None, finders), None)
        if following is None:
            break
        module = longer
        spec = following
    return module, spec


def _defines(spec: ModuleSpec | None, names: Sequence[str]) -> bool:
    """Whether the source of a module defines the class that ``names`` lead to, from the outermost
    class to the innermost. The innermost class must have a base class.
    """
    if spec is None or not isinstance(spec.loader, InspectLoader):
        return False
    source = spec.loader.get_source(spec.name)
    nodes: list[ast.AST] = [ast.parse(source, spec.origin or "")] if source else []
    for name in names:
        inside = (inner for node in nodes for inner in ast.walk(node))
        nodes = [node for node in inside if isinstance(node, ast.ClassDef) and node.name == name]
    return any(isinstance(node, ast.ClassDef) and node.bases for node in nodes)


def _takes(kind: Any, data: Any) -> bool:
    """Whether ``data`` can be a value of ``kind``, which is one member of a union."""
    if dataclasses.is_dataclass(kind):
        return isinstance(data, dict) and data.keys() == {
            field.name for field in dataclasses.fields(kind)
        }
    return isinstance(data, list) and get_origin(kind) in (list, tuple)


def changed_fields(before: Any, after: Any, name: str = "") -> dict[str, str]:
    """Return ``old → new`` by field for every leaf in which a frozen config and the config
    ``after`` differ. A field that an older version did not have differs if it is not the default.
    """
    data = frozen(after)
    if not (isinstance(before, dict) and isinstance(data, dict)):
        return {} if before == data else {name: f"{before} → {data}"}
    is_same_kind = dataclasses.is_dataclass(after) and before.get("type") == data.get("type")
    defaults = defaults_of(type(after)) if is_same_kind else {}  # type: ignore[arg-type]
    read = after.get if isinstance(after, dict) else partial(getattr, after)
    prefix = f"{name}." if name else ""
    changes = dict[str, str]()
    for key in {**before, **data}:
        if key in before or key not in defaults or data[key] != frozen(defaults[key]):
            value = read(key, data.get(key))
            changes |= changed_fields(before.get(key), value, f"{prefix}{key}")
    return changes


def read_frozen(path: Path) -> tuple[str, RunConfig]:
    """Return the name of a run and the config that it wrote to ``path``.

    Raises ConfigError for any other file.
    """
    content = read_config_file(path, f"--config {path}")
    try:
        return content["name"], thawed(content["config"])
    except ConfigError as error:
        raise error.inside(f"--config {path}") from error


def read_config_file(path: Path, title: str) -> dict[str, Any]:
    """Return the name and the frozen config that a run wrote to ``path``.

    Raises ConfigError, with a message that begins with ``title``, for any other file.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError("there is no such file", field=title, fix=A_RUNS_FILE) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=title) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", field=title, fix=A_RUNS_FILE) from error
    require(isinstance(content, dict), f"holds {shown(content)}", field=title, fix=A_RUNS_FILE)
    for key, kind in (("name", str), ("config", dict)):
        has_key = isinstance(content.get(key), kind)
        require(has_key, f"it has no {key!r}", field=title, fix=A_RUNS_FILE)
    return content
