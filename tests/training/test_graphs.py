"""torch.compile makes few graphs of flex attention and of its masks, whatever lengths batches have.

Dynamo makes the graphs here, and nothing compiles them; Inductor may make more on a GPU.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.models.common import attention as titan

from rl.compat.titan import compile_flex_attention
from rl.training.attention import MaskedAttention, tree_mask
from rl.training.micro_batches import lay_out
from rl.training.packing import MicroBatchLimits, plan
from rl.training.trainer_config import TrainerConfig
from tests.kit.batches import ragged_batch


@pytest.fixture
def graphs(monkeypatch):
    """Return the numbers of graphs of attention and of masks, which run eagerly."""
    attention, masks = CompileCounter(), CompileCounter()
    compiled = torch.compile(flex_attention, backend=attention)
    monkeypatch.setattr(titan.FlexAttention, "_compiled_flex_attn", staticmethod(compiled))
    compiled = torch.compile(create_block_mask, backend=masks)
    monkeypatch.setattr(titan, "_compiled_create_block_mask", compiled)
    torch._dynamo.reset()
    yield lambda: (attention.frame_count, masks.frame_count)
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize(("windows", "wanted"), [((0,), (4, 2)), ((128, 0), (6, 3))])
def test_batches_of_any_lengths_have_few_graphs(graphs, windows, wanted):
    """Dynamo's limit is 8. Attention has graphs with and without gradients."""
    limits = MicroBatchLimits.of(TrainerConfig(micro_batch_tokens=1024), "flex")
    inner = MaskedAttention.Config().build()
    draw = torch.Generator().manual_seed(0)
    widths = set()
    for _ in range(4):
        batch = ragged_batch(torch.randint(2, 400, (6,), generator=draw).tolist())
        for rows in [*plan(batch, limits), []]:
            positions = lay_out(batch, rows, limits).positions
            length = positions.shape[1]
            widths.add(length)
            q, k = torch.zeros(1, length, 4, 16), torch.zeros(1, length, 2, 16)
            for window in windows:
                mask = titan.create_attention_mask(
                    tree_mask(positions, window), 1, None, length, length, device="cpu"
                )
                for learns in (True, False):
                    with torch.set_grad_enabled(learns):
                        inner(q, k, k, attention_masks=mask, enable_gqa=True)
    assert widths == {256, 512, 768, 1024}
    assert graphs() == wanted


@pytest.mark.parametrize("tune", [False, True])
def test_a_field_decides_whether_kernels_of_flex_attention_are_tuned(monkeypatch, tune):
    """``trainer.tune_attention``, which an engine passes on if it is on a GPU."""
    flex = titan.FlexAttention
    for name in ("inductor_configs", "_compiled_flex_attn"):
        monkeypatch.setattr(flex, name, vars(flex)[name])  # restored afterwards
    compile_flex_attention(tune=tune)
    options = flex._compiled_flex_attn.get_compiler_config()
    assert options["max_autotune"] is options["coordinate_descent_tuning"] is tune
    assert options["wrap_inductor_compiled_regions"] is True
