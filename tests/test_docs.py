"""Names, links, commands and code in the README and the pages of docs/ exist and work."""

import importlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rl.cli.arguments import read_config
from rl.config.algorithm import ALGORITHMS
from rl.plan.__main__ import main as plan
from tests import warm
from tests.kit.commands import check_command, check_options
from tests.kit.pages import (
    LANGUAGES,
    PAGES,
    ROOT,
    WRITTEN,
    anchors,
    blocks,
    commands,
    links,
    quoted,
    text_of,
    words,
)
from tests.kit.scripts import module
from tests.kit.tables import cases, check_rows, long

FOLDERS = ("rl", "configs", "scripts", "docs", "tests")
LONGEST_README = 1300  # words
LONGEST_EXAMPLE = 20  # lines of code in a block of the README


def pages_with(language: str) -> list[str]:
    return [page for page in WRITTEN if blocks(page, language)]


@cache
def sources() -> str:
    """Return the source of Tiller and of its scripts."""
    paths = [path for folder in FOLDERS[:3] for path in (ROOT / folder).rglob("*.*")]
    return "\n".join(path.read_text() for path in paths if path.suffix in (".py", ".sh"))


@pytest.fixture(scope="module")
def field_names():
    """Every config field by its full name, of all kinds of parts that ship."""
    with pytest.MonkeyPatch.context() as patch:
        script = module("scripts/make_configuration_md.py", patch)
        places = {
            f"{place}.{name}".removeprefix(".")
            for kind, section in script.sections().items()
            for place in section.places
            for name, _ in script.own_fields(kind)
        }
    return {re.sub(r"\bNAME\b", "*", place) for place in places}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Models and a file of problems, under the names that the pages have for them."""
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        script = module("scripts/make_tiny_model.py", patch)
    script.main(["--model-dir", str(folder / "tiny"), "--data", str(folder / "tiny.jsonl")])
    config = folder / "tiny" / "config.json"
    longer = json.loads(config.read_text()) | {"max_position_embeddings": 32768}
    config.write_text(json.dumps(longer))
    (folder / "DIR").symlink_to("tiny")
    (folder / "FILE").symlink_to("tiny.jsonl")
    judge = folder / "runs" / "judge" / "export"
    judge.parent.mkdir(parents=True)
    (folder / "runs" / "sft").mkdir()
    (folder / "runs" / "sft" / "export").symlink_to(folder / "tiny")
    shutil.copytree(folder / "tiny", judge)
    with safe_open(judge / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    width = tensors["model.norm.weight"].shape
    save_file(tensors | {"score.weight": torch.zeros(1, *width)}, judge / "model.safetensors")
    return folder


@pytest.fixture
def in_folder(inputs, tmp_path):
    """Return a context in a folder with a page's modules, and the inputs of commands."""

    @contextmanager
    def enter(page: str) -> Iterator[None]:
        names = {block.module: block.code for block in blocks(page) if block.module}
        folder = tmp_path / page.replace("/", "-")
        folder.mkdir()
        for name, code in names.items():
            (folder / f"{name}.py").write_text(code)
        for path in inputs.iterdir():
            (folder / path.name).symlink_to(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.syspath_prepend(folder)
            yield
        for name in names:
            sys.modules.pop(name, None)

    return enter


def test_the_readme_is_short():
    assert words("README.md") <= LONGEST_README
    long = [block for block in blocks("README.md") if block.lines_of_code > LONGEST_EXAMPLE]
    assert [str(block) for block in long] == []


def test_the_index_has_every_page():
    pages = {Path(page).name for page in PAGES if page.startswith("docs/")}
    assert {*links("docs/README.md")} == pages - {"README.md"}


def test_the_map_of_the_house_has_every_package():
    packages = {f"rl/{path.parent.name}" for path in (ROOT / "rl").glob("*/__init__.py")}
    assert packages - {*quoted("docs/architecture.md")} == set()


def test_every_method_of_the_architecture_exists():
    found = quoted("docs/architecture.md")
    names = [text for text in found if re.fullmatch(r"[A-Z]\w+\.\w+", text)]
    files = [path.read_text() for path in (ROOT / "rl").rglob("*.py")]

    def is_there(owner: str, method: str) -> bool:
        return any(f"class {owner}" in text and f"def {method}(" in text for text in files)

    assert names
    assert [name for name in names if not is_there(*name.split("."))] == []


def test_the_config_that_is_shown_is_the_quickstarts():
    shown = [block.code for block in blocks("docs/getting-started.md", "python")]
    assert (ROOT / "configs" / "quickstart.py").read_text() in shown


def test_every_algorithm_that_is_shown_by_name_is_a_config_and_all_are_shown():
    rows = re.findall(r"`(--algorithm ([a-z_]+)[^`]*)`", text_of("docs/algorithms.md"))
    assert {name for _, name in rows} == {*ALGORITHMS}

    def check(row: tuple[str, str]) -> None:
        read_config(["--config", "gsm8k_jsonl", *row[0].split()], program="test")

    check_rows(rows, check)


def test_the_changelog_begins_with_this_version():
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    assert re.findall("^## (.+)$", text_of("CHANGELOG.md"), re.MULTILINE)[0] == version


def test_every_block_has_a_language():
    def check(page: str) -> None:
        found = blocks(page)
        assert [str(block) for block in found if block.language not in LANGUAGES] == []
        assert text_of(page).count("```") == 2 * len(found), "a fence is not closed"

    check_rows(WRITTEN, check)


def test_every_link_and_picture_exists():
    lost = []
    for page in PAGES:
        for link in links(page):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
            name = str(target.relative_to(ROOT))
            if not target.exists() or (anchor and anchor not in anchors(name)):
                lost.append(f"{page}: {link}")
    assert lost == []


def is_field(name: str, known: set[str]) -> bool:
    """Whether ``name``, in which ``*`` stands for any text, is a field or an entry of a dict."""
    pattern = re.escape(name).replace(r"\*", r"[\w.*]*")
    if any(re.fullmatch(pattern, field) for field in known):
        return True
    above = name.rpartition(".")[0]
    while above and above not in known:
        above = above.rpartition(".")[0]
    return bool(above) and not any(field.startswith(f"{above}.") for field in known)


def exists(text: str, known: set[str]) -> bool:
    """Whether what stands in backticks exists, if it looks like a path, an option or a field."""
    word = text.split()[0]
    if word.startswith("--"):
        option = word.partition("=")[0].rstrip(".,")
        return option in sources() or is_field(re.sub("^--", "", option), known)
    first = re.split(r"[./]", word)[0]
    if first in FOLDERS and "/" in word:
        return any(ROOT.glob(word.split("::")[0]))
    if re.fullmatch(r"[\w.-]+\.(py|sh)", word):
        return any(any((ROOT / folder).rglob(word)) for folder in FOLDERS)
    if re.fullmatch(r"[a-z0-9_.-]+\.(jsonl?|log|npz|png)", word):
        return word in sources()
    if first == "rl" and "." in word:
        return imports(word.partition("(")[0])
    fields_of_configs = {name.partition(".")[0] for name in known}
    if first in fields_of_configs and re.fullmatch(r"[\w*]+(\.[\w*]+)+", word.partition("=")[0]):
        return is_field(word.partition("=")[0], known)
    return True


def imports(name: str) -> bool:
    """Whether ``rl.a.b`` is a module, or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_every_name_in_backticks_exists(field_names):
    @cache
    def is_there(text: str) -> bool:
        return exists(text, field_names)

    lost = [f"{page}: {text}" for page in WRITTEN for text in quoted(page) if not is_there(text)]
    assert lost == []


def test_every_command_parses(in_folder):
    def check(page: str) -> None:
        with in_folder(page):
            shown = blocks(page, "bash")
            for block, command in [(each, line) for each in shown for line in commands(each)]:
                try:
                    (check_options if block.untested else check_command)(command)
                except Exception as error:
                    raise AssertionError(f"{block}: {' '.join(command)}: {error}") from error

    check_rows(pages_with("bash"), check)


@pytest.mark.parametrize("rehearsed", [False, long(True)])
def test_a_plan_that_is_shown_is_what_the_program_prints(capsys, rehearsed):
    shown = [block for page in WRITTEN for block in blocks(page, "text")]
    plans = [block for block in shown if block.code.startswith("$ python -m rl.plan ")]
    chosen = [block for block in plans if ("--rehearse" in block.code) == rehearsed]
    assert chosen
    for block in chosen:
        command, _, rest = block.code.partition("\n")
        plan(command.partition(" (")[0].split()[4:])
        printed = capsys.readouterr().out
        pieces = [piece for line in rest.splitlines() for piece in line.split("…")]
        assert [piece for piece in pieces if piece not in printed] == [], str(block)


# the block of docs/session.md starts another engine
@pytest.mark.parametrize(
    "page", cases(pages_with("python"), {*pages_with("python")} - {"docs/session.md"})
)
def test_every_python_block_runs(page, in_folder):
    """Blocks run in order, in a process of their own."""
    with in_folder(page):
        lines = ["from rl.actors import fork_server", "fork_server.start()"]
        for block in blocks(page, "python"):
            if block.module:
                lines.append(f"from {block.module} import *")
            elif not block.untested:
                lines.append(f"exec(compile({block.code!r}, {str(block)!r}, 'exec'))")
        Path("blocks.py").write_text("\n".join(lines))
        done = warm.run(Path("blocks.py").absolute(), cwd=Path.cwd(), timeout=600)
    assert done.returncode == 0, done.stderr
