"""Fixtures of the tests of real sessions."""

import pytest

from rl.actors.generator import GeneratorMesh
from rl.actors.trainer import TrainerMesh
from tests.session.open_actors import OpenGenerator, OpenTrainer
from tests.session.sessions import Sessions


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """Starts sessions of open actors for one file's tests, and ends them all after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerMesh, "actor", OpenTrainer)
        patch.setattr(GeneratorMesh, "actor", OpenGenerator)
        sessions = Sessions(tmp_path_factory.mktemp("sessions"))
        yield sessions
        sessions.close()
