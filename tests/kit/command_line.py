"""Config of a command line."""

from rl.cli.arguments import parse_config
from rl.config import RLConfig

PROGRAM = "python -m rl.train"


def parse(*overrides: str, config: str = "quickstart") -> RLConfig:
    return parse_config(["--config", config, *overrides], program=PROGRAM)[1]


def parse_line(line: str, config: str = "quickstart") -> RLConfig:
    return parse(*line.split(), config=config)
