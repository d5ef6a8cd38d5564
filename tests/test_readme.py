"""The README and CONTRIBUTING name what is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = "rl|configs|scripts|docs|tests"


def test_every_path_exists():
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text()
        paths = re.findall(rf"(?:[(`]|\s)((?:{FOLDERS})/[\w./-]*\w)", text)
        assert [path for path in paths if not (ROOT / path).exists()] == []
        assert paths, f"{name} names none"


def test_every_file_of_the_package_listing_exists():
    readme = (ROOT / "README.md").read_text()
    listing = re.search(r"## The house\n\n```\n(.*?)```", readme, re.DOTALL)[1]
    names = re.findall(r"\b(\w+\.py|\w+/)(?= )", listing.partition("\nrl/\n")[2])
    assert [name for name in names if not (ROOT / "rl" / name).exists()] == []
    folders = {path.parent.name for path in (ROOT / "rl").glob("*/__init__.py")}
    assert {name[:-1] for name in names if name.endswith("/")} == folders


def test_the_config_it_shows_is_the_quickstarts():
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"```python\n(def quickstart.*?)```", readme, re.DOTALL)[1]
    assert (ROOT / "configs" / "quickstart.py").read_text().endswith(shown)
