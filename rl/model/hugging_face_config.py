"""Reading of a Hugging Face folder's config.json, with transformers' defaults."""

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rl.errors import ConfigError, require

LARGEST = {"num_hidden_layers": 1024, "num_experts": 2**16}
LARGEST_SIZE = 2**31 - 1
FULL, NEAR, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LAYER_TYPES = {"attention": FULL, "full": FULL}
"""Other names of kinds of layers."""

BASES = {"rope_theta": "global", "rope_local_base_freq": "local"}
"""Keys of bases of rotary embeddings, with their names in transformers' defaults."""
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
ROPE_NUMBERS = {
    "linear": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
}
"""Numbers above 0 that a kind of rope scaling needs, and those that a file may leave out."""


def layer_types(count: int, kind: str, layers: Collection[int]) -> list[str]:
    """Return ``layer_types`` of a model whose ``layers`` are of ``kind`` and all others FULL."""
    return [kind if layer in layers else FULL for layer in range(count)]


def read_json(field: str, path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises ConfigError, naming ``field`` and ``path``, if the file cannot be read or holds no
    object.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field=field) from None
    kind = type(content).__name__
    fix = "it must be a JSON object, {...}"
    require(kind == "dict", f"{path} holds a {kind}", field=field, fix=fix)
    return content  # type: ignore[no-any-return]


class HuggingFaceConfig(dict[str, Any]):
    """The config.json of ``folder``. ``[key]`` is transformers' default if the file lacks the key.

    Its methods return checked values. They raise ConfigError, naming ``field``, file, key and
    value.
    """

    def __init__(self, field: str, folder: Path):
        self.field = field
        self.path = folder / "config.json"
        self.config_class = "PreTrainedConfig"
        """Name of transformers' class, which has the defaults."""
        super().__init__(read_json(field, self.path))

    @property
    def defaults(self) -> Any:
        """transformers' class."""
        import transformers  # takes a second; published configs are complete

        return getattr(transformers, self.config_class)

    def __missing__(self, key: str) -> Any:
        if key not in BASES:
            return getattr(self.defaults, key, None)
        base = getattr(self.defaults, "default_theta", None)
        return base[BASES[key]] if isinstance(base, dict) else base

    def require(self, condition: bool, key: str, value: Any, allowed: str) -> None:
        """Raise ConfigError unless ``condition``."""
        problem = f"{key} in {self.path} is {value!r}"
        require(condition, problem, field=self.field, fix=allowed)

    def one_of(self, key: str, allowed: tuple[Any, ...], value: Any = ...) -> Any:
        """Return ``value``, which is that of ``key`` unless given, if it is among ``allowed``."""
        value = self[key] if value is ... else value
        holds = any(value == option and type(value) is type(option) for option in allowed)
        listed = " or ".join(repr(option) for option in allowed if option is not None)
        self.require(holds, key, value, f"Tiller trains {listed or 'models without it'} only")
        return value

    def size(self, key: str) -> int:
        """Return a whole number above 0."""
        value = self[key]
        largest = LARGEST.get(key, LARGEST_SIZE)
        holds = type(value) is int and 1 <= value <= largest
        self.require(holds, key, value, f"it must be a whole number from 1 to {largest}")
        return value  # type: ignore[no-any-return]

    def number(self, key: str, value: Any = ...) -> float:
        """Return ``value``, which is that of ``key`` unless given, if it is finite and above 0."""
        value = self[key] if value is ... else value
        holds = type(value) in (int, float) and math.isfinite(value) and value > 0
        self.require(holds, key, value, "it must be a finite number above 0")
        return value  # type: ignore[no-any-return]

    def window(self, *, switched: bool) -> int | None:
        """Return the number of tokens that layers attend to if one of them is limited, else None.

        ``switched`` is whether the family has the key ``use_sliding_window``.
        """
        is_off = switched and not self["use_sliding_window"]
        window = None if is_off or self["sliding_window"] is None else self.size("sliding_window")
        layers = self.get("layer_types")
        if isinstance(layers, list):
            layers = self["layer_types"] = [LAYER_TYPES.get(str(kind), kind) for kind in layers]
        kinds = [FULL, *([NEAR] if window else [])]
        count = self["num_hidden_layers"]
        is_list = isinstance(layers, list) and len(layers) == count
        holds = layers is None or (is_list and all(kind in kinds for kind in layers))
        allowed = f"it must be null, or {' or '.join(map(repr, kinds))} for each of {count} layers"
        self.require(holds, "layer_types", layers, allowed)
        return window

    def windowed_layers(self) -> tuple[int, ...]:
        """Return the layers that ``sliding_window`` limits: those of ``layer_types`` or its default
        in transformers, or all if transformers' config of the family has no such key.
        """
        layers = [NEAR] * self["num_hidden_layers"]
        if hasattr(self.defaults, "layer_types"):
            layers = self.get("layer_types") or self.defaults.from_dict(dict(self)).layer_types
        return tuple(layer for layer, kind in enumerate(layers) if kind == NEAR)

    def rope_share(self, default: float | None) -> float:
        """Return the share of a head that is rotated; None as the ``default`` allows 1 only."""
        key = "partial_rotary_factor"
        places = [self.get("rope_scaling") or self.get("rope_parameters"), self]
        shares = [place[key] for place in places if isinstance(place, dict) and key in place]
        share = next((value for value in shares if value is not None), default or 1.0)
        if default is None:
            return float(self.one_of(key, (1.0, 1), share))
        numbers = self.number(key, share) * self["head_dim"]
        holds = share <= 1 and int(numbers) % 2 == 0 and numbers >= 2
        self.require(holds, key, share, "it must be at most 1, and rotate an even number of a head")
        return float(share)

    def default_rope(self) -> dict[str, Any]:
        """Set ``rope_parameters`` to those of transformers' config if the file has none, and return
        them; otherwise {}.
        """
        if self.get("rope_scaling") or self.get("rope_parameters") is not None:
            return {}
        self["rope_parameters"] = rope = dict(self.defaults().rope_parameters)
        return rope

    def rope(self, layers: str = "") -> tuple[float, tuple[tuple[str, Any], ...]]:
        """Return the base of the rotary embedding, and the items of transformers' parameters of a
        scaled one; none for the default kind. If each kind of layers has its own, it is that of
        ``layers``, FULL or NEAR.

        transformers reads them from rope_scaling, or from rope_parameters if rope_scaling is empty.
        If that object has no base, the base is ``rope_theta`` or its default. The dynamic kind is
        the default one up to ``max_position_embeddings``, which no sequence exceeds.
        """
        place = "rope_scaling" if self.get("rope_scaling") else "rope_parameters"
        rope = self.get(place) or {}
        if layers:
            place = f"{layers} of rope_parameters"
            rope = self._rope_of(layers)
        is_flat = isinstance(rope, dict) and not any(isinstance(one, dict) for one in rope.values())
        allowed = "it must be null or an object with one rope_type for all layers"
        self.require(is_flat, place, rope, allowed)
        kind = rope.get("rope_type", rope.get("type", "default"))
        self.one_of(f"rope_type of {place}", ROPE_KINDS, kind)
        default = "rope_local_base_freq" if layers == NEAR else "rope_theta"
        theta = rope["rope_theta"] if "rope_theta" in rope else self[default]
        base = float(self.number("rope_theta", theta))
        if kind not in ROPE_NUMBERS:
            return base, ()
        key = "original_max_position_embeddings"  # transformers prefers that of the file
        length = self.get(key, rope.get(key, self["max_position_embeddings"]))
        section = {**rope, key: length}
        needed, optional = ROPE_NUMBERS[kind]
        present = [
            key
            for key in optional
            if section.get(key) is not None and (section[key] != 0 or key == "attention_factor")
        ]
        items = [
            (key, self.number(f"{key} of {place}", section.get(key))) for key in (*needed, *present)
        ]
        if kind == "yarn" and "truncate" in section:
            truncate = self.one_of(f"truncate of {place}", (True, False, None), section["truncate"])
            items.append(("truncate", truncate))
        return base, (("rope_type", kind), *items)

    def _rope_of(self, layers: str) -> Any:
        """Return the parameters of the kind ``layers``; transformers scales FULL ones alone by
        rope_scaling, and ignores parameters that are of no kind.
        """
        kinds = self.get("rope_parameters") or {}
        holds = isinstance(kinds, dict) and isinstance(kinds.get(layers), dict | None)
        allowed = f"it must be null or an object with an object for {FULL} and one for {NEAR}"
        self.require(holds, "rope_parameters", kinds, allowed)
        rope = kinds.get(layers) or {}
        scaling = self.get("rope_scaling") if layers == FULL else None
        return {**rope, **scaling} if isinstance(scaling, dict) else scaling or rope
