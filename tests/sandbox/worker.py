"""Runs all attacks, as the user that this process has: ``python -m tests.sandbox.worker NAME``."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from rl.sandbox import sandbox
from rl.sandbox.sandbox import LAUNCHER, Bubblewrap, Landlock, Sandbox, Unsafe
from rl.sandbox.sandboxed_program import Limits
from tests.sandbox.attacks import ATTACKS, LIMITS, MESSES

AT_ONCE = 4
PATIENCE_S = 60.0
SANDBOXES = {each.name: each for each in (Bubblewrap(), Landlock(), Unsafe())}


async def attack(wall: Sandbox, folder: Path) -> dict:
    """Return all results by name."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def run(name: str, code: str, limits: Limits) -> tuple[str, dict]:
        async with turns:
            result = await wall.run_async(code, limits=limits)
        return name, {
            key: getattr(result, key) for key in ("exit_code", "stdout", "stderr", "limit")
        }

    jobs = []
    root = os.getuid() == 0
    for name, each in ATTACKS.items():
        if wall.name == "unsafe" and (each.shown == "none" or (each.shown == "root" and not root)):
            continue
        victim = folder / name.replace("/", "_")
        victim.write_text("victim")
        jobs.append(run(name, each.program(str(victim), os.getpid()), Limits(wall_s=30, cpu_s=10)))
    for name, code in MESSES.items():
        code = f"VICTIM = {str(folder / 'mess')!r}\n{code}"
        jobs.append(run(name, code, Limits(wall_s=30, cpu_s=10)))
    for name, (code, limits, _) in LIMITS.items() if wall.name != "unsafe" else ():
        jobs.append(run(name, code, Limits(**{"wall_s": 30, "cpu_s": 10, **limits})))
    return dict(await asyncio.gather(*jobs))


def own_launcher(folder: Path) -> Path:
    """Start programs of this process by a copy of the launcher, so that ``programs`` finds them."""
    sandbox.LAUNCHER = Path(shutil.copy(LAUNCHER, folder / "launcher.py"))
    return sandbox.LAUNCHER


def programs(launcher: Path) -> set[int]:
    """Return the processes that were started by ``launcher``."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(launcher) in (process / "cmdline").read_text():
                found.add(int(process.name))
    return found


def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, scratch, launchers = (
            Path(place, each) for each in ("files", "scratch", "launcher")
        )
        for each in (folder, scratch, launchers):
            each.mkdir()
        secret = os.memfd_create("secret", 0)
        os.write(secret, b"secret")
        os.set_inheritable(secret, True)
        tempfile.tempdir = str(scratch)
        launcher = own_launcher(launchers)
        results = asyncio.run(attack(SANDBOXES[name], folder))
        tempfile.tempdir = None
        ends = time.monotonic() + PATIENCE_S
        while (left := programs(launcher)) and time.monotonic() < ends:
            time.sleep(0.02)  # the kernel may still be ending them
        for process in left:
            os.kill(process, signal.SIGKILL)
        changed = [path.name for path in folder.iterdir() if path.read_text() != "victim"]
        print(
            json.dumps(
                {
                    "user": os.getuid(),
                    "processes": sorted(left),
                    "results": results,
                    "scratch": os.listdir(scratch),
                    "changed": changed,
                    "victims": len(os.listdir(folder)),
                }
            )
        )


if __name__ == "__main__":
    main(sys.argv[1])
