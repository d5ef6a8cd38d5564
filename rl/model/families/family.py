"""Description of a model family: how Hugging Face folders write the options of a ModelShape."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.model.hugging_face_config import FULL, NEAR, HuggingFaceConfig, layer_types

SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
}
"""Keys of sizes in config.json, by field of ModelShape."""

EXPERT_SIZES = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_hidden_dim": "moe_intermediate_size",
}
"""Additional keys of a model with experts."""

LOCAL_EXPERT_SIZES = {
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_hidden_dim": "intermediate_size",
}
"""Additional keys of a model with experts of the width of a feed-forward layer."""

OUTPUT_NORMS = {
    "layers.{}.attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
"""Names of the norms of a model that normalizes outputs alone."""

REWARD_CLASS = "ForSequenceClassification"
"""Last part of the names of transformers' models with one score for a sequence in place of the
output head."""

DTYPES = ("float32", "bfloat16", "float16")

ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, 0, None),
}
ALLOWED_IF_PRESENT: dict[str, tuple[Any, ...]] = {
    "auto_map": (None,),
    "compression_config": (None,),
    "configuration_files": (None,),
    "dual_chunk_attention_config": (None,),
    "is_causal": (True, None),
    "per_layer_config": (None,),
    "quantization_config": (None,),
    "shared_expert_intermediate_size": (0, None),
    "transformers_weights": (None,),
}
"""Keys that transformers' configs do not list, but that change the computation or the files of the
model."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of torchtitan's decoder, in the words of Hugging Face.

    A subclass may override ``read`` and ``write`` for keys that the fields cannot describe.
    """

    model_type: str
    """``model_type`` in config.json."""

    prefix: str
    """First part of the names of transformers' classes, such as "Llama" of LlamaForCausalLM."""

    other_names: tuple[str, ...] = ()
    """Other names of the language model in ``architectures``."""

    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelShape that differ from its defaults, unless a key sets them."""

    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys of config.json that are true or false, with the fields of ModelShape that they set."""

    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Other keys that change the computation, with the values that Tiller computes. The first of
    them is written."""

    head_dim: int | None = None
    """Width of a head if config.json lacks it; None is hidden_size // num_attention_heads."""

    expert_sizes: Mapping[str, str] = field(default_factory=dict)
    """Additional keys of sizes if experts replace the feed-forward layers, such as EXPERT_SIZES."""

    has_reward_class: bool = True
    """Whether transformers has a reward model of the family."""

    has_windows: bool = False
    """Whether ``sliding_window`` limits the attention of layers."""

    rope_share: float | None = None
    """Share of a head that is rotated if config.json lacks it; None if it is always 1."""

    two_ropes: bool = False
    """Whether layers with a window have a rotary embedding of their own, which is not scaled."""

    tensors: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that Qwen3 lacks or names differently, by torchtitan's; {} is the layer. All
    experts are one tensor unless its name has a second {}."""

    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors of a layer that have the rows of several tensors of Qwen3, one after the other."""

    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ends of the names of tensors that a folder may have in place of those of each expert, with
    the layers of an expert whose rows they have. An export has those of each expert."""

    left_out: tuple[str, ...] = ()
    """First parts of the names of tensors that are not of the language model, without "model."."""

    @property
    def has_experts(self) -> bool:
        """Whether experts replace the feed-forward layers."""
        return bool(self.expert_sizes)

    @property
    def config_class(self) -> str:
        """Name of transformers' config."""
        return f"{self.prefix}Config"

    @property
    def policy_class(self) -> str:
        """Name of transformers' language model."""
        return f"{self.prefix}ForCausalLM"

    @property
    def reward_class(self) -> str:
        """Name of transformers' reward model."""
        return f"{self.prefix}{REWARD_CLASS}"

    def random(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a model of ``sizes`` with random weights, as fields of
        ModelShape.
        """
        return dict(self.fixed)

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        """Return the fields of a ModelShape that ``config`` describes, for sequences of at most
        ``max_seq_len`` tokens.

        Raises ConfigError, naming the key, for a value that Tiller does not compute. An attention
        window that holds the longest sequence changes nothing, and is left out.
        """
        config.config_class = self.config_class
        config.setdefault("head_dim", self.head_dim)
        is_set = config.get("sliding_window") is not None
        if not self.has_windows and not (is_set and hasattr(config.defaults, "sliding_window")):
            config["sliding_window"] = None
        names = (self.policy_class, self.reward_class, f"{self.prefix}Model", *self.other_names)
        classes: tuple[Any, ...] = (*([name] for name in names), [], None)
        config.one_of("architectures", classes, config.get("architectures"))
        for key in ALLOWED_IF_PRESENT.keys() - self.expert_sizes.values():
            config.one_of(key, ALLOWED_IF_PRESENT[key], config.get(key))
        for key, values in {**ALLOWED, **self.allowed}.items():
            config.one_of(key, values)
        sizes = self._sizes(config)
        fields = {**self.fixed, **sizes}
        for key, names in self.options.items():
            fields |= dict.fromkeys(names, config.one_of(key, (True, False)))
        fields["rope_share"] = config.rope_share(self.rope_share)
        length = min(max_seq_len, config.size("max_position_embeddings"))
        fields["max_seq_len"] = length
        window = config.window(switched="use_sliding_window" in self.allowed)
        allowed = f"the family {self.model_type!r} has no windows; set has_windows"
        config.require(window is None or self.has_windows, "sliding_window", window, allowed)
        fields["norm_eps"] = config.number("rms_norm_eps")
        fields["tie_embeddings"] = bool(config.one_of("tie_word_embeddings", (True, False, None)))
        fields["rope_theta"], fields["rope_scaling"] = config.rope(FULL if self.two_ropes else "")
        dtypes = (config.get(key) for key in ("dtype", "torch_dtype"))
        dtype = str(next((value for value in dtypes if value is not None), DTYPES[0]))
        fields["dtype"] = config.one_of("dtype", DTYPES, dtype.removeprefix("torch."))
        limits = window is not None and window < length
        layers = config.windowed_layers() if limits or self.two_ropes else ()
        if limits and layers:
            fields |= {"window": window, "layers_with_window": layers}
        if self.two_ropes:
            config.size("sliding_window")  # transformers needs it even if no layer does
        if self.two_ropes and layers:
            theta, scaling = config.rope(NEAR)
            allowed = f"Tiller scales the rotary embedding of {FULL} only"
            config.require(not scaling, f"rope_type of {NEAR}", dict(scaling), allowed)
            fields |= {"local_rope_theta": theta, "layers_with_local_rope": layers}
        return fields

    def write(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of a model whose ModelShape has the fields ``shape``, as
        transformers reads it.
        """
        sizes = SIZES | dict(self.expert_sizes)
        rope = {"rope_theta": shape["rope_theta"], **dict(shape["rope_scaling"])}
        rope = {"rope_type": "default"} | rope
        if self.rope_share:
            rope["partial_rotary_factor"] = shape["rope_share"]
        if self.two_ropes:
            theta = shape["local_rope_theta"] or shape["rope_theta"]
            rope = {FULL: rope, NEAR: {"rope_type": "default", "rope_theta": theta}}
        windows: dict[str, Any] = {"sliding_window": None} if self.has_windows else {}
        limited = shape["layers_with_local_rope"] or shape["layers_with_window"]
        if self.has_windows and (limited or self.two_ropes):
            windows["sliding_window"] = shape["window"] or shape["max_seq_len"]
            windows["layer_types"] = layer_types(shape["n_layers"], NEAR, limited)
            if "use_sliding_window" in self.allowed:
                windows["use_sliding_window"] = True
        return {
            "architectures": [self.policy_class],
            "model_type": self.model_type,
            **{key: shape[name] for name, key in sizes.items()},
            **{
                key: values[0]
                for key, values in {**ALLOWED, **self.allowed}.items()
                if values[0] is not None
            },
            **{key: shape[names[0]] for key, names in self.options.items()},
            **windows,
            "tie_word_embeddings": shape["tie_embeddings"],
            "rope_parameters": rope,
            "max_position_embeddings": shape["max_seq_len"],
            "rms_norm_eps": shape["norm_eps"],
            "dtype": shape["dtype"],
        }

    def _sizes(self, config: HuggingFaceConfig) -> dict[str, int]:
        if self.has_experts:
            count = self.expert_sizes["num_experts"]
            both = ("num_local_experts", "num_experts")  # transformers takes the first
            config[count] = next((config[key] for key in both if key in config), config[count])
        heads = config.size("num_attention_heads")
        if config["num_key_value_heads"] is None and not self.has_experts:
            config["num_key_value_heads"] = heads
        if config["head_dim"] is None:
            config["head_dim"] = config.size("hidden_size") // heads
        keys = SIZES | dict(self.expert_sizes)
        sizes = {name: config.size(key) for name, key in keys.items()}
        groups = sizes["n_kv_heads"]
        allowed = f"it must divide num_attention_heads={heads}"
        config.require(heads % groups == 0, "num_key_value_heads", groups, allowed)
        if self.has_experts:
            chosen = sizes["experts_per_token"]
            allowed = f"it must be at most {count}={sizes['num_experts']}"
            fits = chosen <= sizes["num_experts"]
            config.require(fits, "num_experts_per_tok", chosen, allowed)
        return sizes
