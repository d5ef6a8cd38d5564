"""Program that checks what decides whether Tiller works on the GPUs of this host.

Exit codes: 0 all checks that ran are ok, 1 one is not, 2 the arguments cannot work or there is no
GPU, 130 Ctrl-C.
"""

import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from rl.cli.program import begin, exit_code
from rl.errors import end_program, require
from scripts.gpu_check.checks import CHECKS, WIDTH, Check
from scripts.gpu_check.processes import run_check
from scripts.gpu_check.report import Report
from scripts.gpu_check.verdicts import Verdict

DESCRIPTION = """\
Check what decides whether Tiller works on the GPUs of this host. Each check runs in
a process of its own with a deadline, and prints one line: ok, skipped, or FAIL with
what is wrong. What is most likely wrong comes first. A JSON file and a page are
written after each check; mail both, which have the ends of the logs.

  scripts/gpu_check.sh
  scripts/gpu_check.sh --detach
  scripts/gpu_check.sh --only parity push-rdma
  scripts/gpu_check.sh --hf-path Qwen3-0.6B

A stand-in without a GPU, on tiny models:

  scripts/gpu_check.sh --device cpu"""
EPILOG = """\
exit codes: 0 all checks that ran are ok, 1 one is not, 2 the arguments cannot work
or there is no GPU, 130 Ctrl-C"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: _check(_parser().parse_args(given), given))


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
        help="file for versions, lines and numbers, with a page beside it that ends in .md "
        "(default: gpu_check.json)",
    )  # fmt: skip
    parser.add_argument(
        "--detach", action="store_true",
        help="check in the background, also after this terminal is closed; lines go to a file "
        "beside that of --json that ends in .log",
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


def _check(own: Namespace, given: Sequence[str]) -> int:
    if own.detach:
        return _detach(own.json.with_suffix(".log"), given)
    chosen = choose(own.only)
    if own.list:
        for check in chosen:
            print(f"{check.name:<{WIDTH}}{counted_gpus(check)}  {check.what}")
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)  # KeyboardInterrupt ends the check
    arguments = ["--device", own.device]
    if own.hf_path:
        arguments += ["--hf-path", str(Path(own.hf_path).resolve())]
    for check in chosen:
        begin_s = time.monotonic()
        folder = (logs / check.name).absolute()
        if own.device == "cuda" and check.gpus > gpus:
            verdict = Verdict(skipped=f"needs {check.gpus} GPUs, and this host has {gpus}")
        else:
            child = [sys.executable, "-m", "scripts.gpu_check.child", check.name]
            command = [*child, *arguments, "--folder", str(folder)]
            verdict = run_check(check, command, folder, device=own.device)
        report.add(check, verdict, time.monotonic() - begin_s, folder)
    return report.end()


def _detach(output: Path, given: Sequence[str]) -> int:
    """Start this program again without a terminal; it prints to ``output``."""
    rest = [argument for argument in given if argument != "--detach"]
    with output.open("w") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.gpu_check", *rest],
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            start_new_session=True,
        )
    print(f"process {process.pid} checks; to follow it: tail -f {output}")
    return 0


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


def _gpus() -> int:
    from rl.host.platform import device_count  # imports torch, which --help and --list do without

    return device_count()


if __name__ == "__main__":
    begin()
    end_program(main())
