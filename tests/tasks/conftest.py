from pathlib import Path

import pytest

from rl.model.shape import ModelConfig


@pytest.fixture(scope="session")
def tiny(tiny_model) -> tuple[Path, Path]:
    """Folder of a tiny model, and a file of 60 problems for it."""
    return tiny_model, tiny_model.parent / "data"


@pytest.fixture(scope="session")
def model(tiny_model) -> ModelConfig:
    return ModelConfig(hf_path=str(tiny_model))
