"""Runs all attacks, as the user that this process has: ``python -m tests.sandbox.worker NAME``."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from rl.sandbox.limits import Limits
from rl.sandbox.sandbox import Bubblewrap, Landlock, Sandbox, Unsafe
from tests.sandbox.attacks import ATTACKS, LIMITS, MESSES

AT_ONCE = 4
SANDBOXES = {each.name: each for each in (Bubblewrap(), Landlock(), Unsafe())}


async def attack(sandbox: Sandbox, folder: Path) -> dict:
    """Return all results by name."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def run(name: str, code: str, limits: Limits) -> tuple[str, dict]:
        async with turns:
            result = await sandbox.run_async(code, limits=limits)
        return name, {
            key: getattr(result, key) for key in ("exit_code", "stdout", "stderr", "limit")
        }

    jobs = []
    root = os.getuid() == 0
    for name, each in ATTACKS.items():
        if sandbox.name == "unsafe" and (
            each.shown == "none" or (each.shown == "root" and not root)
        ):
            continue
        victim = folder / name.replace("/", "_")
        victim.write_text("victim")
        jobs.append(run(name, each.program(str(victim), os.getpid()), Limits(wall_s=30, cpu_s=10)))
    for name, code in MESSES.items():
        code = f"VICTIM = {str(folder / 'mess')!r}\n{code}"
        jobs.append(run(name, code, Limits(wall_s=30, cpu_s=10)))
    for name, (code, limits, _) in LIMITS.items() if sandbox.name != "unsafe" else ():
        jobs.append(run(name, code, Limits(**{"wall_s": 30, "cpu_s": 10, **limits})))
    return dict(await asyncio.gather(*jobs))


def programs() -> set[int]:
    """Return the processes that run programs, of whatever sandbox."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if "launcher.py" in (process / "cmdline").read_text():
                found.add(int(process.name))
    return found


def main(name: str) -> None:
    os.environ["TILLER_SECRET"] = "secret"
    before = programs()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        secret = os.memfd_create("secret", 0)
        os.write(secret, b"secret")
        os.set_inheritable(secret, True)
        tempfile.tempdir = scratch
        results = asyncio.run(attack(SANDBOXES[name], Path(folder)))
        tempfile.tempdir = None
        left = programs() - before
        for process in left:
            os.kill(process, signal.SIGKILL)
        changed = [path.name for path in Path(folder).iterdir() if path.read_text() != "victim"]
        print(
            json.dumps(
                {
                    "processes": sorted(left),
                    "user": os.getuid(),
                    "results": results,
                    "scratch": os.listdir(scratch),
                    "changed": changed,
                    "victims": len(os.listdir(folder)),
                }
            )
        )


if __name__ == "__main__":
    main(sys.argv[1])
