"""Syntax, rules and paths of the Dockerfile. No test builds the image."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN"}
KNOWN |= {"SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}
"""Instructions that may stand in the file: those of Docker without ADD, MAINTAINER and ONBUILD."""


def instructions(text: str | None = None) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, by default Tiller's, with their arguments."""
    text = (ROOT / "Dockerfile").read_text() if text is None else text
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    found = (line.partition(" ") for line in lines if line.strip())
    return [(name, " ".join(rest.split())) for name, _, rest in found]


def lint(text: str) -> Iterator[str]:
    """Yield the rules of hadolint, by number, that the text of a Dockerfile breaks."""
    found = instructions(text)
    names = [name for name, _ in found]
    if "FROM" not in names or {*names[: names.index("FROM")]} - {"ARG"}:
        yield "DL3061 starts with FROM or ARG"
    if names.count("CMD") > 1:
        yield "DL4003 one CMD"
    for name, rest in found:
        if name not in KNOWN:
            yield f"DL1000 unknown instruction {name}"
        if name == "FROM" and (":" not in rest or ":latest" in rest):
            yield "DL3006 tag of the base image"
        if name == "WORKDIR" and not rest.startswith("/"):
            yield "DL3000 absolute WORKDIR"
        if name in ("CMD", "ENTRYPOINT") and not is_json_list(rest):
            yield f"DL3025 JSON form of {name}"
        if name == "COPY" and len(rest.split()) > 2 and not rest.endswith("/"):
            yield "DL3021 COPY of several files to a folder"
        if name == "ENV" and "=" not in rest.split()[0]:
            yield "DL3044 ENV name=value"
        if name == "RUN":
            yield from lint_shell(rest)


def lint_shell(command: str) -> Iterator[str]:
    """Yield the rules that the command of a RUN breaks."""
    checked = subprocess.run(["sh", "-n", "-c", command], capture_output=True, timeout=120)
    if checked.returncode:
        yield "SC1000 syntax of the shell"
    words = set(command.split())
    if words & {"sudo", "cd"}:
        yield "DL3003 no cd and no sudo"
    if "|" in words:
        yield "DL4006 pipefail"
    if "apt-get install" in command:
        if not words & {"-y", "--yes"}:
            yield "DL3014 --yes"
        if "--no-install-recommends" not in words:
            yield "DL3015 --no-install-recommends"
        if "apt-get update" not in command or "rm -rf /var/lib/apt/lists/*" not in command:
            yield "DL3009 update and delete the lists in the same RUN"


def is_json_list(text: str) -> bool:
    return text.startswith("[") and bool(json.loads(text))


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
    required = re.search(
        r'requires-python = "==(\d+\.\d+)\.', (ROOT / "pyproject.toml").read_text()
    )
    assert base == f"python:{required[1]}-slim"


def test_the_dockerfile_breaks_no_rule():
    assert [*lint((ROOT / "Dockerfile").read_text())] == []
