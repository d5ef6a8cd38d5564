"""The private names that ``rl.compat`` relies on exist, and no other module uses private names."""

import ast
import dis
import importlib
import inspect
import random
import re
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import packages_distributions, version
from multiprocessing import get_context
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from rl.compat import WRITTEN_FOR
from rl.compat.torch_internals import set_unique_cache_keys
from tests.private_names import ON_CPU, RELIES_ON

ROOT = Path(__file__).parents[1]
MODULES = sorted(path.stem for path in (ROOT / "rl/compat").glob("[!_]*.py"))
FOREIGN = {*WRITTEN_FOR, "torchao", "transformers"}


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    """Return a process that may import vLLM, which changes the environment."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process


def test_the_installed_packages_have_every_name_that_compat_relies_on(elsewhere):
    sentences = [each for found in elsewhere.map(moved_from, MODULES) for each in found]
    assert not sentences, "\n".join(sentences)


def test_a_name_that_is_gone_or_has_other_parameters_fails_with_a_sentence():
    gone = [
        "torch.nn:Module._gone",
        "torch.nn:Module.register_buffer(name, tensor, _gone)",
        "torch.nn:Module.register_buffer(tensor, name)",
        "torch.nn._gone:Module",
        "torch:ops.mkldnn._linear_pointwise(X, _gone)",
    ]
    assert moved("torch_internals", gone) == [
        f"torch {version('torch')}: {name} is gone or changed; rl/compat/torch_internals.py was "
        f"written for {WRITTEN_FOR['torch']}: port it"
        for name in gone
    ]


def test_an_entry_of_a_table_may_have_several_members_of_one_owner():
    assert names_in("a.b:C.d(e, f) _g h()") == ["a.b:C.d(e, f)", "a.b:C._g", "a.b:C.h()"]
    assert names_in("a.b:_c _d") == ["a.b:_c", "a.b:_d"]


def test_compat_was_written_for_the_versions_that_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    pins = dict(pin.split("==") for group in groups for pin in group if "==" in pin)
    names = {"monarch": "torchmonarch"}
    assert {name: pins[names.get(name, name)] for name in WRITTEN_FOR} == WRITTEN_FOR


def test_only_compat_uses_private_names_of_other_packages(elsewhere):
    known = elsewhere.submit(private_names).result()
    folders = [ROOT / name for name in ("rl", "configs", "scripts")]
    found = [path for folder in folders for path in folder.rglob("*.py")]
    paths = [path for path in found if path.parent.name != "compat"]
    uses = [
        f"{path.relative_to(ROOT)}:{use} is private to another package: move it to rl/compat"
        for path in paths
        for use in private_uses(path.read_text(), known)
    ]
    assert not uses, "\n".join(uses)


def test_the_search_finds_each_way_to_a_private_name():
    ways = [
        "from torch.nn._x import y",
        "from torch import _x",
        "import torch._x",
        "import torch.nn as nn\nnn.Module._x()",
        "from torch.nn import Module\nModule._x",
        "anything._local_tensor",
        "getattr(anything, '_local_tensor')",
    ]
    assert [way for way in ways if len(private_uses(way, {"_local_tensor"})) != 1] == []


def test_graphs_that_torch_cannot_hash_have_unique_keys(monkeypatch):
    from torch._functorch._aot_autograd import autograd_cache

    monkeypatch.setattr(autograd_cache, "random", random)  # restores it after the test
    set_unique_cache_keys()
    graph = torch.fx.Graph()
    graph.output(graph.call_function(private_uses))
    module = torch.fx.GraphModule({}, graph)
    keys = set()
    for _ in range(2):
        random.seed(0)
        with torch._functorch.config.patch(bypass_autograd_cache_key=True):
            keys.add(autograd_cache.autograd_cache_key(module, [], None, None)[0])
    assert len(keys) == 2


def moved_from(module: str) -> list[str]:
    """Return a sentence for each name in the table of ``module`` that is gone or changed."""
    return moved(module, table_of(module))


def table_of(module: str) -> list[str]:
    """Return the names in the table of ``module``, each with its owner."""
    importlib.import_module(f"rl.compat.{module}")
    from vllm.platforms import current_platform  # changes the environment

    table = RELIES_ON[module] + (ON_CPU.get(module, ()) if current_platform.is_cpu() else ())
    return [name for entry in table for name in names_in(entry)]


def names_in(entry: str) -> list[str]:
    """Return "owner:a" and "owner:b" for the entry "owner:a b"; parameters are kept."""
    first, *others = re.findall(r"[\w.:]+(?:\(.*?\))?", entry)
    owner = re.match(r"[\w.:]+[.:]", first)[0]
    return [first, *(f"{owner}{other}" for other in others)]


def moved(module: str, names: Any) -> list[str]:
    sentences = []
    for name in names:
        package = name.partition(":")[0].partition(".")[0]
        if not is_there(name):
            installed = version(packages_distributions()[package][0])
            sentences.append(
                f"{package} {installed}: {name} is gone or changed; rl/compat/{module}.py was "
                f"written for {WRITTEN_FOR[package]}: port it"
            )
    return sentences


def is_there(name: str) -> bool:
    """Whether "module:path(parameters)" exists and takes the parameters, in this order."""
    module, path, parameters = re.fullmatch(r"([\w.]+):([\w.]+)(?:\((.*)\))?", name).groups()
    *owners, last = path.split(".")
    try:
        found = importlib.import_module(module)
        for each in owners:
            found = getattr(found, each)
    except (ImportError, AttributeError):
        return False
    if not hasattr(found, last):
        return parameters is None and inspect.isclass(found) and last in attributes(found)
    asked = (parameters or "").replace(",", " ").split()
    return not asked or [each for each in taken(getattr(found, last)) if each in asked] == asked


def taken(function: Any) -> list[str]:
    """Return the names of the parameters of a function, a class or an operator of torch."""
    if hasattr(function, "overloads"):
        return [argument.name for argument in function.default._schema.arguments]
    return list(inspect.signature(function).parameters)


def attributes(kind: type) -> set[str]:
    """Return the attributes that annotations or methods give to instances."""
    names = set()
    for each in kind.__mro__:
        names |= inspect.get_annotations(each).keys()
        for member in vars(each).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            names |= stored(code) if code else set()
    return names


def stored(code: CodeType) -> set[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}


def private_names() -> set[str]:
    """Return the names with an underscore in all tables."""
    table = [name for module in MODULES for name in table_of(module)]
    names = {name.partition("(")[0].split(".")[-1] for name in table}
    return {name for name in names if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(code: str, known: set[str]) -> list[str]:
    """Return "line: name" of each private name of a foreign package in ``code``."""
    tree = ast.parse(code)
    foreign = set()
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            targets = [(f"{node.module}.{each.name}", each) for each in node.names]
        elif isinstance(node, ast.Import):
            targets = [(each.name, each) for each in node.names]
        else:
            continue
        for target, each in targets:
            if target.partition(".")[0] in FOREIGN:
                foreign.add((each.asname or each.name).partition(".")[0])
                uses += [
                    f"{node.lineno}: {target}" for part in target.split(".") if is_private(part)
                ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            is_foreign = isinstance(root, ast.Name) and root.id in foreign
            if node.attr in known or is_foreign:
                uses.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.Constant) and node.value in known:
            uses.append(f"{node.lineno}: {node.value!r}")
    return uses
