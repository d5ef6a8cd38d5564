"""Environment of the processes of generators."""

import pytest

from rl.generation.generator_config import GeneratorConfig, environment


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("bfloat16", None)])
def test_triton_multiplies_float32_in_full_for_a_float32_generator(dtype, precision, monkeypatch):
    """vLLM's attention of float32 on GPUs is a Triton kernel, and Triton's default is TF32."""
    from triton import knobs

    for name, value in environment(GeneratorConfig(dtype=dtype)).items():
        monkeypatch.setenv(name, value)
    assert knobs.language.fp32_default == precision
