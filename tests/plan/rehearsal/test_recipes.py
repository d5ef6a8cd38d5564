"""Every shipped recipe runs on GPUs at its full size as planned."""

import pytest

from rl.cli.arguments import shipped_configs
from rl.config import RLConfig
from tests.plan.rehearsal.test_layouts import check_run

RECIPES = {name: make for name, make in shipped_configs().items() if name != "serve_tiny"}
RL = [name for name, make in RECIPES.items() if isinstance(make(), RLConfig)]
GPUS = "--hardware.device h100 --hardware.gpus_per_node 8"


def on_gpus(name: str) -> str:
    """Return the options with which a recipe of RL runs on GPUs."""
    return GPUS if RECIPES[name]().hardware.device == "auto" else ""


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_runs_as_planned(name, options, rehearsals):
    check_run(rehearsals.of(f"--config {name} {on_gpus(name) if name in RL else options}"))
