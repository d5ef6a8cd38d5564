"""One rank in pytest's own process; each layout played once, by ranks of their own."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.training.disk import checkpointer_of
from tests.training.layouts import LAYOUTS
from tests.training.ranks import on_ranks, rank_environment
from tests.training.scenes import CUTS, KINDS, MODELS, TIED_FUSED, engine_of, play


@pytest.fixture(scope="module", autouse=True)
def lone_rank():
    """pytest's process is a world of one rank; engines of a module share its process group."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in rank_environment(0, 1).items():
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
def played(tmp_path_factory):
    """Return a function that runs a model in a layout, once a session: answers by rank, folder.

    One rank plays every cut, several those of ``KINDS`` unless ``cuts`` says otherwise.
    """
    done = {}

    def plays(model: str, layout: str, cuts: tuple[str, ...] = KINDS):
        if (model, layout, cuts) not in done:
            folder = str(tmp_path_factory.mktemp(f"{model}-{layout}"))
            ranks = LAYOUTS[layout].ranks
            answers = (
                [play(model, layout, folder, tuple(CUTS))]
                if ranks == 1
                else on_ranks(ranks, play, model, layout, folder, cuts)
            )
            done[model, layout, cuts] = answers, folder
        return done[model, layout, cuts]

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
