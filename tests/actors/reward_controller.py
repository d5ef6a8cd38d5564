"""Program of a test: a controller whose reward has started processes.

Usage: python -m tests.actors.reward_controller FOLDER
"""

import asyncio
import dataclasses
import sys
from pathlib import Path

from rl.actors import fork_server
from tests.actors.test_reward_workers import COMPLETIONS, pids_of, workers_and_task
from tests.kit.moody_task import FORKS


async def main(folder: Path) -> None:
    workers, task = workers_and_task(folder, 1)
    # a second try would find the processes of the first one ended
    workers.deadlines = dataclasses.replace(workers.deadlines, reward=60.0)
    await workers.start()
    await workers.score(task.prompt(FORKS), COMPLETIONS)
    print(*pids_of(workers), "scored", flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    fork_server.start(preload=False)
    asyncio.run(main(Path(sys.argv[1])))
