"""Commands and paths of the Dockerfile. No test builds the image."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, with their arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    found = (line.partition(" ") for line in lines if line.strip())
    return [(name, " ".join(rest.split())) for name, _, rest in found]


def copied() -> list[str]:
    """Return the paths that are copied into the image."""
    sources = [rest.split()[:-1] for name, rest in instructions() if name == "COPY"]
    return [path for paths in sources for path in paths]


def test_every_copied_path_exists_and_is_sent_to_the_builder():
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied()
    for path in copied():
        assert (ROOT / path).exists(), path
        assert f"!{path}" in sent


def test_every_script_that_is_run_exists_and_is_copied():
    runs = [rest for name, rest in instructions() if name == "RUN"]
    scripts = re.findall(r"\S+\.(?:sh|py)\b", " ".join(runs))
    assert "scripts/setup.sh" in scripts
    for script in scripts:
        assert (ROOT / script).stat().st_mode & 0o100, script
        assert script.split("/")[0] in copied()


def test_the_scripts_read_only_what_is_copied():
    script = (ROOT / "scripts" / "setup.sh").read_text()
    read = [name for name in ("pyproject.toml", "constraints.txt") if name in script]
    read += re.findall(r'^readme = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(read) == 3
    assert {*read} <= {*copied()}


def test_the_device_is_one_that_setup_takes():
    default = dict(rest.split("=") for name, rest in instructions() if name == "ARG")["DEVICE"]
    assert f"{default} |" in (ROOT / "scripts" / "setup.sh").read_text()


def test_the_base_image_has_the_python_that_is_required():
    (base,) = (rest for name, rest in instructions() if name == "FROM")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.fullmatch(r"python:(3\.\d+)-slim", base)
    assert found[1] in SpecifierSet(project["requires-python"])


def test_every_command_is_one_of_a_shell():
    for name, command in instructions():
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", command], check=True, timeout=120)
