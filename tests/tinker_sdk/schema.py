"""Print routes, messages and fields of the Tinker SDK as JSON, in its own environment."""

import ast
import dataclasses
import importlib
import json
import pkgutil
from pathlib import Path

VERBS = {"get", "post", "put", "patch", "delete"}


def routes(root: Path) -> list[str]:
    """Return each route of the SDK's clients, as in ``GET /api/v1/samplers/{}``."""
    found = set()
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            verb = node.func.attr.lstrip("_")
            place = template(node.args[0]) if node.args else ""
            if verb in VERBS and "/api/v1/" in place and not path.name.endswith("_test.py"):
                found.add(f"{verb.upper()} {place}")
    return sorted(found)


def template(node: ast.expr) -> str:
    """Return the text of a literal with {} for its variables; empty for other nodes."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in parts)


def messages(file) -> dict[str, list[str]]:
    """Return the fields of each message of a protobuf file, and the values of each enum."""
    found = {name: fields(message) for name, message in file.message_types_by_name.items()}
    for name, enum in file.enum_types_by_name.items():
        found[name] = [f"{value.number} {value.name}" for value in enum.values]
    return found


def fields(message) -> list[str]:
    """Return number, name, type, and oneof of each field."""
    found = []
    for each in message.fields:
        kind = each.message_type or each.enum_type
        words = [each.number, each.name, each.type, kind.full_name if kind else ""]
        group = each.containing_oneof
        words += ["repeated" if each.is_repeated else "", group.name if group else ""]
        found.append(" ".join(str(word) for word in words if word != ""))
        if each.message_type and each.message_type.GetOptions().map_entry:
            found += [f"  {line}" for line in fields(each.message_type)]
    return found


def bodies(root: Path) -> dict[str, list[str]]:
    """Return the fields of each class of bodies; ``*`` marks those without a default."""
    import pydantic

    found: dict[str, set[str]] = {}
    for module in pkgutil.walk_packages([str(root / "types")], "tinker.types."):
        for kind in vars(importlib.import_module(module.name)).values():
            if not isinstance(kind, type) or not kind.__module__.startswith("tinker"):
                continue
            own = found.setdefault(kind.__name__, set())
            if issubclass(kind, pydantic.BaseModel):
                fields = kind.model_fields.items()
                own |= {f"{name}{'*' * info.is_required()}" for name, info in fields}
            elif dataclasses.is_dataclass(kind):
                names = {each.name for each in dataclasses.fields(kind)}
                own |= names - {name.removesuffix("*") for name in own}
    shown = {name: [each for each in own if each[0] != "_"] for name, own in found.items()}
    return {name: sorted(own) for name, own in sorted(shown.items()) if own}


def main() -> None:
    import tinker
    from tinker.proto import tinker_public_pb2

    root = Path(tinker.__file__).parent
    schema = {
        "version": tinker.__version__,
        "routes": routes(root),
        "messages": messages(tinker_public_pb2.DESCRIPTOR),
        "bodies": bodies(root),
    }
    print(json.dumps(schema))


if __name__ == "__main__":
    main()
