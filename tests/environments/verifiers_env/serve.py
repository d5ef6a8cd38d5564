"""Write the data of all tasks to a file, then serve the taskset; prints the address."""

import asyncio
import sys

from sums_env import Sums
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.utils.loaders import resolve_env_config

if __name__ == "__main__":
    config = resolve_env_config(
        {
            "taskset": {"id": "sums_env"},
            "agent": {"harness": {"id": "sums_env"}, "runtime": {"type": "subprocess"}},
        }
    )
    with open(sys.argv[1], "w") as file:
        for task in Sums(config.taskset).load():
            print(task.data.model_dump_json(), file=file)
    server = EnvServer(config, "tcp://127.0.0.1:0")
    print(server.address, flush=True)
    asyncio.run(server.run())
