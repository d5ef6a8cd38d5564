"""Program in the foreground of a terminal of its own, whose ranks import what sets the terminal."""

import asyncio
import os
import sys
import termios
from pathlib import Path

from monarch.actor import Actor

from rl.actors import fork_server
from rl.actors.endpoint import endpoint
from rl.actors.group import ActorGroup
from rl.actors.hosts import Hosts
from rl.actors.processes import ensure_runtime
from rl.errors import end_program
from rl.types import Place

DEADLINE_S = 20.0


class Importing(Actor):
    @endpoint
    async def set_terminal(self) -> str:
        """Set the terminals of this process, which stops a process in the background."""
        for number in (0, *([os.open("/dev/tty", os.O_RDWR)] if has_terminal() else [])):
            if os.isatty(number):
                termios.tcsetattr(number, termios.TCSANOW, termios.tcgetattr(number))
        return f"{os.readlink('/proc/self/fd/0')} {has_terminal()}"


def has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[4] != "0"


async def main(folder: Path) -> None:
    group = ActorGroup("importing", Place(ranks=1), Hosts(folder))
    try:
        await group.spawn(Importing, deadline=DEADLINE_S, meet=False)
        print(*await group.on(timeout_s=DEADLINE_S).call(Importing.set_terminal))
    finally:
        await group.stop()


if __name__ == "__main__":
    terminal, ours = os.openpty()
    os.dup2(os.open(os.ttyname(ours), os.O_RDWR), 0)  # the leader of a session gets it by that
    assert os.tcgetpgrp(0) == os.getpgrp()
    logs = Path(sys.argv[1])
    if sys.argv[2] == "forked":
        fork_server.start(preload=False)
    ensure_runtime(logs / "controller.log")
    asyncio.run(main(logs))
    end_program(0)
