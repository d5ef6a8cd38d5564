"""Sizes of the policy, from config fields or from a Hugging Face folder."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rl.errors import require
from rl.model.families import BUILT_IN, Family, family_named, family_of_folder
from rl.model.hub import Snapshot, refuse_pointer
from rl.model.hugging_face_config import LINEAR, HuggingFaceConfig, layer_types
from rl.types.rules import PERFORMANCE, NeedsCuda, above, at_least


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A decoder, dense or with experts: sizes for random weights, or a Hugging Face folder."""

    hf_path: str | None = None
    """Folder with config.json, safetensors and tokenizer, or a name on the Hugging Face Hub like
    ``Qwen/Qwen3-0.6B``. Its sizes replace the fields below; ``max_seq_len`` is the smaller of the
    two values."""

    revision: str | None = None
    """Branch, tag or commit of a name on the Hub; None for its default branch. The run folder keeps
    the commit. A run that is resumed stays at that commit, unless ``revision`` is another commit.
    """

    family: str | None = None
    """Model family of random weights: a model type of docs/your-model.md; None is qwen3, with
    experts qwen3_moe. ``hf_path`` replaces it by the family of the
    folder. Or a module of your own with a ``Family`` as ``FAMILY``, also for ``hf_path``."""

    vocab_size: Annotated[int, at_least(1, 10**7)] = 32
    """Number of embeddings; at least the tokenizer's size."""

    dim: Annotated[int, at_least(1, 2**20)] = 64
    """Width of the residual stream."""

    n_layers: Annotated[int, at_least(1, 1024)] = 2
    """Number of transformer layers."""

    n_heads: Annotated[int, at_least(1, 4096)] = 2
    """Number of query heads."""

    n_kv_heads: Annotated[int, at_least(1, 4096)] = 2
    """Number of key and value heads; must divide ``n_heads``."""

    head_dim: Annotated[int, at_least(1, 4096)] = 32
    """Width of an attention head."""

    hidden_dim: Annotated[int, at_least(1, 2**24)] = 192
    """Width of the feed-forward layers of a dense model."""

    num_experts: Annotated[int, at_least(0, 2**16)] = 0
    """Number of experts that replace each feed-forward layer; 0 for a dense model."""

    experts_per_token: Annotated[int, at_least(0, 2**16)] = 0
    """Number of experts that each token is routed to. Their router weights sum to 1, unless
    ``norm_topk_prob`` of ``hf_path`` is false."""

    moe_hidden_dim: Annotated[int, at_least(0, 2**24)] = 0
    """Width of each expert."""

    expert_bias: bool = False
    """Whether a bias is added to the scores of experts where a token's experts are chosen. It
    starts at 0, or as in ``hf_path``, and ``trainer.balance.bias_rate`` changes it."""

    tie_embeddings: bool = True
    """Whether the embedding and the output head share one weight."""

    float32_head: bool = False
    """Whether trainer and generators compute logits in float32. If not, logits are rounded to the
    dtype of the forward pass before log-probs are computed from them in float32."""

    rope_theta: Annotated[float, above(0, 1e15)] = 1e6
    """Base of the frequencies of the rotary position embedding."""

    max_seq_len: Annotated[int, at_least(1, 10**8), PERFORMANCE] = 2048
    """Maximum length of a prompt plus its completion, in tokens."""

    fuse_qkv: bool = True
    """Whether the q, k and v projections share one weight."""

    attention: Annotated[
        Literal["auto", "dense", "varlen", "flex"],
        PERFORMANCE,
        NeedsCuda(("varlen", "flex"), "'auto' or 'dense'"),
    ] = "auto"
    """Attention of the trainer. ``auto`` is dense on CPU, and on CUDA varlen, or flex with context
    parallelism, in float32, or without the FlashAttention package that varlen needs from H100
    on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model, after ``hf_path`` is read; the names are those of ModelConfig."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    num_experts: int
    experts_per_token: int
    moe_hidden_dim: int
    expert_bias: bool
    tie_embeddings: bool
    float32_head: bool
    rope_theta: float
    max_seq_len: int
    dtype: str
    """Dtype of exported weights: that of the weights the model started from."""
    family: str
    """Name of the family, as in ModelConfig."""
    qk_norm: bool = True
    """Whether queries and keys are normalized."""
    wide_qk_norm: bool = False
    """Whether the norms of queries and keys span all heads, in place of each head."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    feed_forward_bias: bool = False
    """Whether the projections of the feed-forward layers have a bias."""
    norm_eps: float = 1e-6
    """Constant that norms add to the mean square."""
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    """Items of transformers' parameters of a scaled rotary embedding, ``rope_type`` among them;
    empty for the default kind."""
    layers_without_rope: tuple[int, ...] = ()
    """Layers that do not rotate queries and keys."""
    layers_with_local_rope: tuple[int, ...] = ()
    """Layers whose rotary embedding has the base ``local_rope_theta`` and no scaling."""
    local_rope_theta: float | None = None
    rope_share: float = 1.0
    """Share of a head, from its first number on, that the rotary embedding rotates."""
    rope_interleaved: bool = False
    """Whether the rotary embedding rotates neighbours, in place of the halves of a head."""
    norm_after_rope: bool = False
    """Whether queries and keys are normalized after the rotary embedding."""
    normalized: Literal["inputs", "outputs", "both"] = "inputs"
    """Sides of attention and feed-forward that are normalized."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + weight, in place of their weight."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Gate of dense feed-forward layers."""
    embedding_scale: float = 1.0
    """Factor of the embeddings."""
    attention_scale: float | None = None
    """Factor of the products of queries and keys; None is head_dim ** -0.5."""
    attention_cap: float = 0.0
    """Bound of the products of queries and keys, cap * tanh(product / cap); 0 for none."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and feed-forward."""
    logits_scale: float = 1.0
    """Divisor of the logits."""
    logits_cap: float = 0.0
    """Bound of the logits, cap * tanh(logit / cap); 0 for none."""
    window: int = 0
    """Number of tokens that ``layers_with_window`` attend to, the own one included."""
    layers_with_window: tuple[int, ...] = ()
    sinks: bool = False
    """Whether each head of queries has a logit for attending to nothing."""
    attention_gate: bool = False
    """Whether each head's output of attention is multiplied by the sigmoid of a gate."""
    layers_with_delta_rule: tuple[int, ...] = ()
    """Layers with a gated delta net (arXiv:2412.06464) in place of attention."""
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    """Number of value heads of a gated delta net, a multiple of ``delta_key_heads``."""
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    """Width of a value head of a gated delta net."""
    delta_kernel: int = 0
    """Number of tokens that the convolution of a gated delta net covers."""
    router_bias: bool = False
    """Whether the router of experts has a bias."""
    route_norm: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    swiglu: tuple[float, float] | None = None
    """Slope and bound of clamped experts; None for experts without bounds and biases."""
    shared_expert_dim: int = 0
    """Width of the expert that all tokens go through; 0 for none."""

    @property
    def kinds(self) -> tuple[int, ...]:
        """First layer with the same parameters, for each layer."""
        delta = [layer in self.layers_with_delta_rule for layer in range(self.n_layers)]
        return tuple(map(delta.index, delta))

    @property
    def n_attentions(self) -> int:
        """Number of layers with attention."""
        return self.n_layers - len(self.layers_with_delta_rule)

    @property
    def masks_attention(self) -> bool:
        """Whether layers attend in another way than causally within a sequence."""
        return self.window > 0 or self.sinks or self.attention_cap > 0

    @property
    def delta_rows(self) -> int:
        """Number of rows of queries, keys and values in a gated delta net."""
        values = self.delta_value_heads * self.delta_value_dim
        return 2 * self.delta_key_heads * self.delta_key_dim + values

    def shortened(self) -> "ModelShape":
        """Return the shape of the shortest model whose layers are of all ``kinds``."""
        return replace(self, n_layers=max(self.kinds) + 1)

    def window_of(self, layer: int) -> int:
        """Return the number of tokens that ``layer`` attends to, 0 for all before it."""
        return self.window if layer in self.layers_with_window else 0


SIZES = tuple(
    field.name
    for field in fields(ModelShape)
    if field.name in {one.name for one in fields(ModelConfig)}
)
"""Fields of ModelShape that ModelConfig has too."""


def shape_of(config: ModelConfig, *, field: str = "model.hf_path") -> ModelShape:
    """Return the sizes of the policy, from ``config.json`` if ``hf_path`` is set.

    Raises ConfigError, naming ``field``, if the folder is missing or incomplete, or if its model is
    of a family that Tiller does not compute.
    """
    if config.hf_path is None:
        sizes = {name: getattr(config, name) for name in SIZES}
        sizes["family"] = config.family or ("qwen3_moe" if config.num_experts else "qwen3")
        family = family_named(sizes["family"])
        require(
            family.has_experts == (config.num_experts > 0),
            f"model.family is {family.model_type!r} and model.num_experts is {config.num_experts}; "
            f"models of this family have {'' if family.has_experts else 'no '}experts",
        )
        return ModelShape(**{**sizes, **family.random(sizes)}, dtype="float32")
    folder = Path(config.hf_path)
    name = repr(str(folder))
    fix = config.hf_path.remedy if isinstance(config.hf_path, Snapshot) else "name one with a model"
    require(folder.is_dir(), f"there is no folder {name}", field=field, fix=fix)
    require((folder / "config.json").is_file(), f"{name} has no config.json", field=field)
    fix = "save the model with safe_serialization=True"
    has_weights = isinstance(config.hf_path, Snapshot) or any(folder.glob("*.safetensors"))
    require(has_weights, f"{name} has no *.safetensors", field=field, fix=fix)
    for file in (*folder.glob("*.json"), *folder.glob("*.safetensors")):
        refuse_pointer(file, field)
    described = HuggingFaceConfig(field, folder)
    module = config.family if config.family not in BUILT_IN else None
    name = family_of_folder(described, module)
    none = dict.fromkeys(("hidden_dim", "num_experts", "experts_per_token", "moe_hidden_dim"), 0)
    read = family_named(name).read(described, config.max_seq_len)
    chosen = {option: getattr(config, option) for option in ("expert_bias", "float32_head")}
    return ModelShape(**{**none, **read, **chosen}, family=name)


def family_of(shape: ModelShape) -> Family:
    """Return the family of ``shape``."""
    return family_named(shape.family)


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """Return the ``config.json`` of a model of this shape, as transformers reads it."""
    return family_of(shape).write(asdict(shape))


def engine_config(shape: ModelShape) -> dict[str, Any]:
    """Return a ``config.json`` with the sizes of ``shape``, as vLLM reads them. Its options are
    those of Qwen3: the model itself reads them from the shape.
    """
    sizes = {name: getattr(shape, name) for name in SIZES}
    family = "qwen3_moe" if shape.num_experts else "qwen3"
    described = hf_config(ModelShape(**{**sizes, "family": family}, dtype=shape.dtype))
    if linear := shape.layers_with_delta_rule:  # vLLM gives these a state
        described["layer_types"] = layer_types(shape.n_layers, LINEAR, linear)
    return described
