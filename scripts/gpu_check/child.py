"""Process of one check: ``python -m scripts.gpu_check.child NAME --device cpu --folder DIR``."""

import asyncio
import sys
from argparse import ArgumentParser
from pathlib import Path

from rl.errors import end_program, error_text, trace_of
from scripts.gpu_check.checks import CHECKS
from scripts.gpu_check.processes import write_verdict
from scripts.gpu_check.setting import Setting
from scripts.gpu_check.verdicts import Verdict


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--hf-path", default="")
    options = parser.parse_args()
    check = next(each for each in CHECKS if each.name == options.name)
    setting = Setting(device=options.device, folder=options.folder, hf_path=options.hf_path)
    try:
        verdict = asyncio.run(check.load()(setting, **check.options))  # type: ignore[arg-type]
    except Exception as error:
        print(trace_of(error), file=sys.stderr)
        verdict = Verdict(wrong=error_text(error).splitlines()[0])
    write_verdict(options.folder, verdict)
    return 0


if __name__ == "__main__":
    end_program(main())
