"""The page's scripts, without a browser."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rl.view import export

LINK = "import('./app.js').catch((error) => { if (error instanceof SyntaxError) throw error; })"
"""Reads all modules and connects their imports. What runs then has no ``document`` in node."""


@pytest.fixture(scope="module")
def node() -> str:
    return shutil.which("node") or pytest.skip("node is not installed")


@pytest.fixture
def page(tmp_path, monkeypatch) -> Path:
    """A copy of the page's folder."""
    folder = Path(shutil.copytree(export.PAGE, tmp_path / "page"))
    (folder / "package.json").write_text('{"type": "module"}')
    monkeypatch.setattr(export, "PAGE", folder)
    return folder


def link(node: str, page: Path) -> str:
    """Return what node says of the modules; "" if each can be read and finds its imports."""
    done = subprocess.run([node, "-e", LINK], cwd=page, capture_output=True, text=True)
    return done.stderr


def test_scripts_can_be_read_and_find_their_imports(node, page):
    assert link(node, page) == ""
    bundle = page / "bundle.cjs"
    bundle.write_text(export.bundle("app"))
    subprocess.run([node, "--check", bundle], check=True)
    assert "import" not in bundle.read_text() and "export " not in bundle.read_text()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("const ROUTED = 1;", "Identifier 'ROUTED' has already been declared"),
        ('import { nothing } from "./base.js";', "does not provide an export named 'nothing'"),
        ("const columns = [;", "Unexpected token"),
    ],
)
def test_a_fault_in_a_script_is_found_without_a_browser(node, page, line, error):
    with open(page / "experts.js", "a") as file:
        file.write(f"{line}\n")
    assert error in link(node, page)


def test_modules_of_the_exported_script_keep_their_names_to_themselves(page, node):
    (page / "base.js").write_text("const COLUMNS = 1;\nexport const one = () => COLUMNS;\n")
    (page / "charts.js").write_text(
        'import { one } from "./base.js";\n\nconst COLUMNS = 2;\n'
        "export async function both() {\n  return [one(), COLUMNS];\n}\n"
    )
    (page / "app.js").write_text(
        'import {\n  both,\n} from "./charts.js";\nboth().then((found) => console.log(found));\n'
    )
    (page / "bundle.cjs").write_text(export.bundle("app"))
    done = subprocess.run(
        [node, "bundle.cjs"], cwd=page, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[ 1, 2 ]\n"
