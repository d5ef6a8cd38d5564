import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rl.model.shape import ModelConfig

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tiny_model.py"


@pytest.fixture(scope="session")
def make_tiny_model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny(make_tiny_model, tmp_path_factory) -> tuple[Path, Path]:
    """Folder of a tiny model, and a file of 60 problems for it."""
    folder = tmp_path_factory.mktemp("tiny")
    model = folder / "model"
    data = folder / "problems.jsonl"
    make_tiny_model.main(["--model-dir", str(model), "--data", str(data), "--lines", "60"])
    return model, data


@pytest.fixture(scope="session")
def model(tiny) -> ModelConfig:
    return ModelConfig(hf_path=str(tiny[0]))
