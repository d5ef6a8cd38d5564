"""Fixtures of the tests of real sessions."""

import asyncio
from contextlib import contextmanager

import pytest

from rl.actors.generator import GeneratorMesh
from rl.actors.policy_trainer import TrainerMesh
from rl.compare.comparison import comparable
from rl.generation.generator_config import GeneratorConfig
from tests.session.open_actors import OpenGenerator, OpenTrainer
from tests.session.sessions import Sessions, config_of, trainer_config


@contextmanager
def opened():
    """Have sessions start open actors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerMesh, "actor", OpenTrainer)
        patch.setattr(GeneratorMesh, "actor", OpenGenerator)
        yield


@pytest.fixture(scope="package")
def runner():
    """The event loop of all sessions of this folder."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="package")
def shared(runner, tmp_path_factory):
    """A session of four trainer ranks and two generator ranks, whose modules can be looked at.

    KV blocks are shorter than the canary's prompt. Use ``common``.
    """
    trainer = trainer_config(fsdp=2, tp=2)
    trainer.training.gc_freq = 3
    generator = GeneratorConfig(tensor_parallel_degree=2, kv_cache_gib=0.05)
    config = comparable(config_of(trainer=trainer, generator=generator))
    sessions = Sessions(tmp_path_factory.mktemp("shared"), runner)
    with opened():
        session = sessions.run(sessions.start_as(config))
        sessions.run(session.load())
    yield session
    sessions.close()


@pytest.fixture(scope="module")
def sessions(runner, tmp_path_factory):
    """Starts sessions of open actors for one file's tests, and ends them all after it."""
    with opened():
        sessions = Sessions(tmp_path_factory.mktemp("sessions"), runner)
        yield sessions
        sessions.close()


@pytest.fixture(scope="module")
def common(sessions, shared):
    """The session that the files of this folder share, with the trainer's weights of this moment in
    its generator. Tests mend what they break.
    """
    sessions.run(shared.connect())
    return shared
