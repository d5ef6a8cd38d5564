import pytest

from rl.model.shape import ModelConfig


@pytest.fixture(scope="session")
def model(tiny_model) -> ModelConfig:
    return ModelConfig(hf_path=str(tiny_model))
