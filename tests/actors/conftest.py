"""What the tests of real meshes share."""

import pytest

from tests.actors.meshes import Meshes


@pytest.fixture(scope="module")
def meshes(tmp_path_factory):
    """Starts meshes for one file's tests, and ends them all after it."""
    meshes = Meshes(tmp_path_factory.mktemp("meshes"))
    yield meshes
    meshes.close()
