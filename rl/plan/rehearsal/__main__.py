"""Process of a rehearsal: takes the number of a rank and a config's arguments, prints JSON."""

import json
import sys

from rl.cli import parse_config
from rl.errors import end_program
from rl.plan.planned_run import PlannedRun
from rl.plan.rehearsal.rehearse import fake_device, rehearse


def main(arguments: list[str]) -> int:
    """Print the rehearsal of every role that has the rank, as one line of JSON."""
    rank = int(arguments[0])
    name, config = parse_config(arguments[1:], program="python -m rl.plan")
    run = PlannedRun(config)
    device = fake_device(run)
    roles = [each for each, role in run.roles.items() if rank < role.trainer.ranks]
    found = [rehearse(device, run, role, rank) for role in roles]
    print(json.dumps({"config": name, "roles": found}))
    return 0


if __name__ == "__main__":
    end_program(main(sys.argv[1:]))
