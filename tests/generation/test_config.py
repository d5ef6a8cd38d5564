"""Environment of the processes of generators."""

import pytest

from rl.generation.config import GeneratorConfig, environment


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_compiled_generator_may_compile(enforce_eager):
    variables = environment(GeneratorConfig(enforce_eager=enforce_eager))
    assert ("TORCH_COMPILE_DISABLE" in variables) == enforce_eager
