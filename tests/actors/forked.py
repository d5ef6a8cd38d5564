"""Module that a forked rank runs as ``__main__``. The variable DO names what it does."""

import json
import os
import random
import resource
import sys
import time
from pathlib import Path

import torch

if __name__ == "__main__":
    match os.environ["DO"]:
        case "describe":
            description = {
                "folder": os.getcwd(),
                "group": os.getpgid(0) == os.getpid(),
                "main": sys.modules["__main__"].__spec__.name,
                "name": Path("/proc/self/comm").read_text().strip(),
                "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                "random": random.random(),
                "threads": torch.get_num_threads(),
                "variables": dict(os.environ),
            }
            print(json.dumps(description))
        case "exit":
            sys.exit(3)
        case "raise":
            raise ValueError("not today")
        case "die":
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        case "hang":
            print(os.getpid(), flush=True)
            time.sleep(3600)
