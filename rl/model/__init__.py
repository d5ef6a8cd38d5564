"""The policy's shape, its torchtitan config and the generator's tensor-parallel table."""
