"""A delta restores the newer version bit for bit, or is not used."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.weights import packed

INTEGERS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
}


@given(
    dtype=st.sampled_from(list(INTEGERS)),
    numel=st.integers(1, 300),
    share=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    block=st.sampled_from([32, 1 << 16]),
    room=st.sampled_from([0.0, 0.5, 2.0, 20.0]),
    seed=st.integers(0, 1 << 32),
)
def test_any_bits_arrive_and_nothing_is_written_beyond_the_capacity(
    dtype, numel, share, block, room, seed
):
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(INTEGERS[dtype])
    old, new = (
        torch.randint(limits.min, limits.max, (numel,), generator=generator) for _ in range(2)
    )
    new = torch.where(torch.rand(numel, generator=generator) < share, new, old)
    old, new = (tensor.to(INTEGERS[dtype]).view(dtype) for tensor in (old, new))
    memory = torch.full((int(room * old.nbytes) + 8,), 77, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "BLOCK", block)
        size = packed.encode_delta(new, old, memory[:-8])
        assert (memory[-8:] == 77).all()
        changed = int((old.view(INTEGERS[dtype]) != new.view(INTEGERS[dtype])).sum())
        needed = 4 * -(-numel // block) + changed * (2 + dtype.itemsize)
        assert size == (needed if needed <= len(memory) - 8 else 0)
        if size:
            packed.apply_delta(memory[:size].clone(), old)
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_negative_zero_differs_from_zero_and_nan_equals_itself():
    old = torch.tensor([0.0, float("nan"), 1.0])
    new = torch.tensor([-0.0, float("nan"), 1.0])
    code = torch.zeros(100, dtype=torch.uint8)
    size = packed.encode_delta(new, old, code)
    assert size == 4 + 1 * (2 + 4)
    packed.apply_delta(code[:size], old)
    assert torch.equal(old.view(torch.int32), new.view(torch.int32))


def test_the_last_element_of_a_full_block_is_encoded():
    old = torch.zeros(2 * packed.BLOCK + 1, dtype=torch.bfloat16)
    new = old.clone()
    new[[packed.BLOCK - 1, packed.BLOCK, 2 * packed.BLOCK]] = 1.0
    code = torch.zeros(100, dtype=torch.uint8)
    packed.apply_delta(code[: packed.encode_delta(new, old, code)], old)
    assert torch.equal(old, new)
