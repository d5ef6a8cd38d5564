"""torchtitan's compiled flex attention, whose options are private."""

import torch
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.models.common.attention import FlexAttention


def compile_flex_attention(*, tune: bool) -> None:
    """Compile flex attention in this process, with the kernels that torch.compile tries out if
    ``tune``, which torchtitan always does. No test covers CUDA.
    """
    tried = dict.fromkeys(("max_autotune", "coordinate_descent_tuning"), tune)
    FlexAttention.inductor_configs = FlexAttention.inductor_configs | tried
    FlexAttention._compiled_flex_attn = torch.compile(
        flex_attention, options=FlexAttention.inductor_configs
    )
