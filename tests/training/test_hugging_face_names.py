"""The pieces of any box of a parameter are the parts that torchtitan's adapter makes."""

from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter

from rl.errors import RunError
from rl.model.decoder import decoder_config
from rl.model.families import family_named
from rl.model.shape import ModelConfig, shape_of
from rl.model.shards import Box
from rl.training.attention import DenseAttention
from rl.training.hugging_face_names import HuggingFaceNames

FAMILY = family_named("qwen3")
HEADS = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 4}
SIZES = {"vocab_size": 11, "dim": 6, "n_layers": 2, **HEADS}


def config_of(fuse_qkv: bool, **experts: int) -> Qwen3Model.Config:
    shape = shape_of(ModelConfig(**SIZES, hidden_dim=5, tie_embeddings=False, **experts))
    return decoder_config(shape, fuse_qkv=fuse_qkv, inner_attention=DenseAttention.Config())


CONFIGS = {
    "fused": config_of(True),
    "split": config_of(False),
    "experts": config_of(True, num_experts=3, experts_per_token=2, moe_hidden_dim=5),
}


def boxes_of(shape: tuple[int, ...], cuts: tuple[list[int], ...]) -> list[Box]:
    """The boxes between ``cuts``, some of them empty, which tile a tensor of ``shape``."""
    edges = [
        sorted([0, *(cut % (size + 1) for cut in here), size])
        for size, here in zip(shape, cuts, strict=False)
    ]
    ranges = product(*(pairwise(edge) for edge in edges))
    return [Box(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in ranges]


some_cuts = st.lists(st.integers(0, 400), max_size=3)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=40)
@given(cuts=st.tuples(some_cuts, some_cuts, some_cuts))
def test_pieces_of_any_box_equal_the_state_dict_adapter(name, cuts):
    def by_the_adapter(
        config: Qwen3Model.Config, parameters: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """torchtitan's own way: its hook splits qkv, then its adapter renames and unstacks."""
        state = dict(parameters)
        fused = SimpleNamespace(head_dim=HEADS["head_dim"], heads_per_kv=3, r_dim=5)
        for layer in range(SIZES["n_layers"]):
            FusedQKVLinear._split_qkv_on_save(
                fused, state, f"layers.{layer}.attention.qkv_linear.", None
            )
        return Qwen3StateDictAdapter(config, None).to_hf(state)

    def parameters_of(config: Qwen3Model.Config) -> dict[str, torch.Tensor]:
        """All parameters, with a value of its own in each element."""
        with torch.device("meta"):
            model = config.build()
        first = 0
        parameters = {}
        for name, parameter in model.named_parameters():
            parameters[name] = torch.arange(first, first + parameter.numel()).view(parameter.shape)
            first += parameter.numel()
        return parameters

    names = HuggingFaceNames(CONFIGS[name], FAMILY)
    parameters = parameters_of(CONFIGS[name])
    wanted = by_the_adapter(CONFIGS[name], parameters)
    shapes = names.tensors({name: tuple(whole.shape) for name, whole in parameters.items()})
    assert shapes == {tensor: tuple(values.shape) for tensor, values in wanted.items()}

    gathered = {tensor: torch.full(shape, -1) for tensor, shape in shapes.items()}
    for parameter, whole in parameters.items():
        for box in boxes_of(tuple(whole.shape), cuts):
            shard = whole[box.slices_in(Box.whole(whole.shape))]
            pieces = list(names.pieces(parameter, tuple(whole.shape), box))
            assert sum(piece.in_tensor.numel for piece in pieces) == shard.numel()
            for piece in pieces:
                target = gathered[piece.tensor][piece.in_tensor.slices_in(Box.whole(piece.shape))]
                assert (target == -1).all()  # no other box had this place
                target.copy_(shard[piece.in_shard])
    assert all(torch.equal(gathered[tensor], values) for tensor, values in wanted.items())


def test_an_unknown_parameter_is_named():
    with pytest.raises(
        RunError, match="layers.0.attention.sinks has no place in a Hugging Face model"
    ):
        list(HuggingFaceNames(CONFIGS["fused"], FAMILY).blocks("layers.0.attention.sinks", (4,)))
