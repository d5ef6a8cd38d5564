"""Every shipped recipe runs on GPUs at its full size as planned."""

import pytest

from rl.cli.arguments import shipped_configs
from rl.config import RLConfig
from tests.plan.rehearsal.test_layouts import check_run

RECIPES = {name: make for name, make in shipped_configs().items() if name != "serve_tiny"}
GPUS = "--hardware.device h100 --hardware.gpus_per_node 8"


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_runs_as_planned(name, options, rehearsals):
    config = RECIPES[name]()
    if not isinstance(config, RLConfig):
        arguments = options
    else:
        arguments = GPUS if config.hardware.device == "auto" else ""
    check_run(rehearsals.of(f"--config {name} {arguments}"))
