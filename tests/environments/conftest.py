import pytest

from rl.model.shape import ModelConfig
from tests.kit.tokenizers import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> ModelConfig:
    return ModelConfig(hf_path=str(make_model(tmp_path_factory.mktemp("model"))))
