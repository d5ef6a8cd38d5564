"""torchtitan's choice of a device, its attention without compilers, its compiled flex attention,
and its Qwen3 in any size, with or without a head.

Each function imports torchtitan's models only when called: the models read the device at import.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import torch

if TYPE_CHECKING:
    from torchtitan.models.qwen3 import Qwen3Model

T = TypeVar("T")


def tell_device(device_type: str, device_module: ModuleType) -> None:
    """Set the device in every imported module of torchtitan: each keeps a copy of the choice."""
    choice = {"device_type": device_type, "device_module": device_module}
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan."):
            vars(module).update({key: choice[key] for key in choice if hasattr(module, key)})


def import_attention_without_compilers() -> None:
    """Import torchtitan's attention without torch's compilers, whose import takes as long as that
    of torch.

    The functions that torchtitan compiles at import are compiled at their first call.
    """

    def compile_later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = functools.cache(lambda: compile_now(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    compile_now = torch.compile
    with mock.patch.object(torch, "compile", compile_later):
        import_module("torchtitan.models.common.attention")


def set_layout(model: "Qwen3Model.Config", trainer: Any) -> None:
    """Set how ``trainer``, a config with ``parallelism`` and ``training``, shards the model's
    parameters and exchanges the tokens of its experts.
    """
    from torchtitan.models.common.token_dispatcher import update_ep_token_dispatcher_config
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    update_ep_token_dispatcher_config(model, trainer)
    # torchtitan sets the other parts of a layer if the layer has attention
    attention = model.first_attention
    layers = [
        layer if layer.attention is not None else dataclasses.replace(layer, attention=attention)
        for layer in model.layers
    ]
    set_qwen3_sharding_config(
        dataclasses.replace(model, layers=layers),
        enable_sp=trainer.parallelism.enable_sequence_parallel,
        enable_ep=trainer.parallelism.expert_parallel_degree > 1,
    )


def qwen3_layers(**sizes: Any) -> list[Any]:
    """Return configs of Qwen3's layers, with experts if ``num_experts`` is among the ``sizes``."""
    from torchtitan.models import qwen3

    mixture = "num_experts" in sizes
    build = qwen3._build_qwen3_moe_layers if mixture else qwen3._build_qwen3_layers
    return build(**sizes)  # type: ignore[no-any-return]


def qwen3_config(
    layers: list[Any], *, vocab_size: int, dim: int, tie_embeddings: bool
) -> "Qwen3Model.Config":
    """Return the config of a Qwen3 of these layers, with torchtitan's norm and initializers."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import Embedding, Linear

    return qwen3.Qwen3Model.Config(
        vocab_size=vocab_size,
        dim=dim,
        norm=qwen3._qwen3_norm(dim),
        enable_weight_tying=tie_embeddings,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=dim,
            param_init=qwen3._EMBEDDING_SKIP_INIT if tie_embeddings else qwen3._EMBEDDING_INIT,
        ),
        lm_head=Linear.Config(
            in_features=dim, out_features=vocab_size, param_init=qwen3._LINEAR_INIT
        ),
        layers=layers,
    )


def without_head(model: T) -> T:
    """Make the forward of ``model``, a decoder or a decoder class, end before the head."""
    model._skip_lm_head = True  # type: ignore[attr-defined]
    return model


def keep_forward_with_lora(layer: type) -> None:
    """Have adapted layers of the class ``layer`` keep its forward, which adds the adapter."""
    from torchtitan.components.lora import _get_lora_cls

    _get_lora_cls(layer).forward = layer.forward  # type: ignore[attr-defined]


def lora_scale(layer: Any) -> float:
    """Return the factor of ``lora_b(lora_a(x))`` in the output of an adapted layer."""
    return layer._lora_scaling  # type: ignore[no-any-return]


def set_lora_scale(layer: Any, scale: float) -> None:
    """Set the factor that ``lora_scale`` returns."""
    assert hasattr(layer, "_lora_scaling"), "torchtitan calls the factor otherwise"
    layer._lora_scaling = scale


def initializers(module: Any) -> "dict[str, Callable[[torch.Tensor], Any]]":
    """Return the initializers of the module's own parameters, by name."""
    return getattr(module, "_param_init", None) or {}


def compile_flex_attention(*, tune: bool) -> None:
    """Compile flex attention in this process, with the kernels that torch.compile tries out if
    ``tune``, which torchtitan always does. No test covers CUDA.
    """
    from torch.nn.attention.flex_attention import flex_attention
    from torchtitan.models.common.attention import FlexAttention

    tried = dict.fromkeys(("max_autotune", "coordinate_descent_tuning"), tune)
    FlexAttention.inductor_configs = FlexAttention.inductor_configs | tried
    FlexAttention._compiled_flex_attn = torch.compile(
        flex_attention, options=FlexAttention.inductor_configs
    )
