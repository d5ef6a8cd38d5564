"""Products, activations and attention of ``parity`` bitwise have bits that depend on the own row
alone. They are called directly here: registered kernels would stay in pytest's process.
"""

from functools import partial

import numpy as np
import pytest
import torch

from rl.model import parity
from rl.model.decoder import gelu
from rl.model.parity import Stretch, attend, groups_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ENDS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 254, 255, 256, 257, 400, 510, 511, 512, 700]
LENGTHS = [1, 1, 1, 2, 7, 8, 9, 16, 31, 32, 33, 128, 129, 700]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@DTYPES
@pytest.mark.parametrize(("inner", "outer"), [(32, 8), (64, 4), (100, 64), (576, 192), (192, 576)])
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(dtype, inner, outer):
    torch.manual_seed(0)
    x = torch.randn(200, inner, dtype=dtype)
    weight, bias = torch.randn(outer, inner, dtype=dtype), torch.randn(outer, dtype=dtype)
    whole, with_bias = parity._mm(x, weight.T), parity._addmm(bias, x, weight.T)
    torch.testing.assert_close(whole, x @ weight.T)
    for begin, rows in [(0, 1), (3, 1), (5, 2), (1, 3), (7, 31), (9, 32), (2, 65), (40, 150)]:
        own = slice(begin, begin + rows)
        assert torch.equal(parity._mm(x[own], weight.T), whole[own])
        assert torch.equal(parity._addmm(bias, x[own], weight.T), with_bias[own])


@DTYPES
def test_an_activation_does_not_depend_on_the_place_of_its_number(dtype):
    x = 4 * torch.randn(2000).to(dtype)
    for kernel, plain in (
        (parity.KERNELS["silu"], torch.nn.functional.silu),
        (parity.KERNELS["sigmoid"], torch.sigmoid),
        (partial(parity.KERNELS["gelu"], approximate="tanh"), gelu),
    ):
        whole = kernel(x)
        torch.testing.assert_close(whole, plain(x))
        for begin in range(0, 500, 7):
            own = slice(begin, begin + 1 + begin % 90)
            assert torch.equal(kernel(x[own]), whole[own])


@DTYPES
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "window", "sinks"),
    [(32, 2, 2, 0, False), (64, 9, 3, 0, True), (80, 4, 1, 20, True), (256, 2, 1, 300, False)],
)
def test_attention_of_a_query_does_not_depend_on_batch_chunk_and_cache(
    dtype, dim, heads, kv_heads, window, sinks
):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    length = max(ENDS)
    q, k, v = (torch.randn(length, n, dim).to(dtype) for n in (heads, kv_heads, kv_heads))
    logits = torch.randn(heads) if sinks else None
    everything = np.arange(length)

    def go(stretches, keys=k, values=v):
        groups = groups_of(stretches, window)
        return attend(q, keys, values, groups, scale=dim**-0.5, sinks=logits)[0]

    whole = go([Stretch(everything, everything)])
    torch.testing.assert_close(
        whole.float(), by_definition(q, k, v, window, logits), atol=2e-2, rtol=0
    )
    places = rng.permutation(2 * length)[:length]  # as the slots of a cache
    cached, cached_values = (
        torch.full((2 * length, kv_heads, dim), 7.0, dtype=dtype) for _ in "kv"
    )
    cached[places], cached_values[places] = k, v
    for _ in range(12):
        stretches = []
        for end in rng.choice(ENDS, 8, replace=False).tolist():
            begin = max(0, end - int(rng.choice(LENGTHS)))
            taken = [each.queries for each in stretches]
            if not np.isin(everything[begin:end], np.concatenate([everything[:0], *taken])).any():
                stretches.append(Stretch(everything[begin:end], places[:end]))
        own = np.concatenate([each.queries for each in stretches])
        assert torch.equal(go(stretches, cached, cached_values)[own], whole[own])


def by_definition(q, k, v, window, sinks) -> torch.Tensor:
    """Return the attention output [L, N, H] of one sequence, float32."""
    length, heads, dim = q.shape
    q, k, v = (each.float().transpose(0, 1) for each in (q, k, v))
    k, v = (each.repeat_interleave(heads // len(k), 0) for each in (k, v))
    place = torch.arange(length)
    far = (place > place[:, None]) | (place <= place[:, None] - (window or length))
    scores = (q @ k.mT * dim**-0.5).masked_fill(far, -torch.inf)
    none = torch.full((heads,), -torch.inf) if sinks is None else sinks
    scores = torch.cat([scores, none.view(-1, 1, 1).expand(-1, length, 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ v).transpose(0, 1)
