"""The SDK's environment, and a server of a tiny model for its programs."""

from types import SimpleNamespace

import pytest

from tests.kit.scripts import module_fixture
from tests.kit.serve import Server

recipes = module_fixture("scripts/tinker_recipes.py", scope="session")
"""The script that runs recipes, as a module."""


@pytest.fixture(scope="session")
def sdk(recipes):
    """The interpreter of the SDK's environment, which is made from the package index."""
    try:
        return recipes.tinker_python()
    except SystemExit as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def served(recipes, tmp_path_factory):
    """A server, and the folder of its model and of data sets."""
    folder = tmp_path_factory.mktemp("tinker")
    recipes.prepare(folder)
    config = ["--config", "serve_tiny", "--model.hf_path", str(folder / recipes.CHAT)]
    with Server(folder, *config, "--output-dir", str(folder / "run")) as server:
        yield SimpleNamespace(url=server.url, folder=folder)
