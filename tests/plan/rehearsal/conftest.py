import pytest

from tests.plan.rehearsal.rehearsals import Rehearsals


@pytest.fixture(scope="package")
def rehearsals():
    """Return the process of the rehearsals."""
    process = Rehearsals()
    yield process
    process.close()


@pytest.fixture(scope="package")
def options(chat_model):
    """Arguments that name a tiny model, and examples of 200 tokens, on GPUs."""
    device = "--hardware.device h100 --hardware.gpus_per_node 8"
    return f"--model.hf_path {chat_model} --model.max_seq_len 256 --task.max_tokens 200 {device}"
