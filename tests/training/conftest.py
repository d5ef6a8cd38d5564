"""One rank in pytest's own process; each layout played once, by ranks of their own."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.kit.ranks import in_layout, loopback_store, rank_environment
from tests.kit.scenes import (
    CUTS,
    KINDS,
    MODELS,
    TIED_FUSED,
    checkpointer_of,
    engine_of,
    play,
)


@pytest.fixture(scope="module", autouse=True)
def lone_rank():
    """pytest's process is a world of one rank; engines of a module share its process group."""
    store = loopback_store()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in rank_environment(0, 1, store.port).items():
            patch.setenv(name, value)
        yield
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path) -> str:
    return str(tmp_path)


@pytest.fixture(params=MODELS)
def model_name(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Return a function that calls another one of a model, a layout, a folder and more on the ranks
    of the layout, once a session: answers by rank, folder.
    """
    done = {}

    def calls(function, model: str, layout: str, *args):
        key = (function, model, layout, *args)
        if key not in done:
            folder = str(tmp_path_factory.mktemp(f"{model}-{layout}"))
            done[key] = in_layout(function, model, layout, folder, *args), folder
        return done[key]

    return calls


@pytest.fixture(scope="session")
def played(once):
    """Return a function that runs a model in a layout. One rank plays every cut, several those of
    ``KINDS`` unless ``cuts`` says otherwise.
    """

    def plays(model: str, layout: str, cuts: tuple[str, ...] = KINDS):
        return once(play, model, layout, tuple(CUTS) if layout == "alone" else cuts)

    return plays


@pytest.fixture
def alone(played, model_name):
    """Return the results of one rank for ``model_name``."""
    (answer,), _ = played(model_name, "alone")
    return answer


@pytest.fixture
def one(folder):
    """Yield an engine, its checkpointer and the folder of its checkpoints."""
    engine = engine_of(TIED_FUSED, folder=folder)
    checkpointer = checkpointer_of(engine, folder)
    yield engine, checkpointer, Path(folder) / "checkpoints"
    checkpointer.close()
