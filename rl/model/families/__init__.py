"""Model families: one module each, whose ``FAMILY`` says how its Hugging Face folders are written.

Only this package knows a family by name. Everything else reads the ModelShape.
"""

from contextlib import suppress
from copy import deepcopy
from dataclasses import fields
from importlib import import_module

from rl.errors import ConfigError, require
from rl.model.families.family import Family
from rl.model.hugging_face_config import HuggingFaceConfig

BUILT_IN = (
    *("cwm", "ernie4_5", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite"),
    *("helium", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3"),
    *("phi3", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "seed_oss"),
    "smollm3",
)
"""Model types of the families in this package, which are also the names of their modules."""
LANGUAGE_MODELS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Types of models with vision, of which the language model alone is trained, and its type."""
REASONS = {
    "gemma3": "Tiller trains no vision; save its language model, a 'gemma3_text', in a folder",
    "qwen3_next": "its folders interleave the rows of z, a and b with those of q, k and v by head",
}
"""Why models of other types are not trained."""
PAGE = "'A family of your own' in docs/your-model.md"


def family_named(name: str) -> Family:
    """Return the family of a model type of BUILT_IN, or the ``FAMILY`` of the module ``name``.

    Raises ConfigError, naming ``model.family``, if ``name`` is neither.
    """
    field = "model.family"
    module = f"{__name__}.{name}" if name in BUILT_IN else name
    rule = f"one of {', '.join(BUILT_IN)}, or a module with a rl.model.families.Family as FAMILY"
    try:
        family = getattr(import_module(module), "FAMILY", None)
    except ImportError as error:
        require(False, f"{name!r} cannot be imported: {error}", field=field, fix=f"name {rule}")
    problem = f"{name!r} has no FAMILY"
    require(isinstance(family, Family), problem, field=field, fix=f"name {rule}")
    return family  # type: ignore[return-value]


def family_of_folder(config: HuggingFaceConfig, module: str | None) -> str:
    """Return the name of the family that reads ``config``: ``module``, or one of BUILT_IN.

    Raises ConfigError, naming the family that is closest, if Tiller has no such family.
    """
    keep_language_model(config)
    model_type = config.get("model_type")
    if module is not None:
        wanted = family_named(module).model_type
        allowed = f"model.family is {module!r}, which reads {wanted!r}"
        config.require(model_type == wanted, "model_type", model_type, allowed)
        return module
    if model_type == "mistral" and "layer_types" in config:  # transformers reads it as a Ministral
        return "ministral"
    if model_type not in BUILT_IN:
        near = closest(config)
        fits = f"; its options fit {near!r}, which may be the model_type to set" if near else ""
        allowed = (
            f"Tiller trains {' or '.join(map(repr, BUILT_IN))}, and with model.family a module of "
            f"your own: {PAGE}{fits}"
        )
        config.require(False, "model_type", model_type, REASONS.get(str(model_type), allowed))
    return model_type  # type: ignore[return-value]


def keep_language_model(config: HuggingFaceConfig) -> bool:
    """Reduce the ``config`` of a model with vision to that of its language model. Return whether it
    was one.
    """
    kind = LANGUAGE_MODELS.get(str(config.get("model_type")))
    if kind is None:
        return False
    text = config.get("text_config")
    config.require(isinstance(text, dict), "text_config", text, "it must be an object")
    shared = ("tie_word_embeddings", "dtype", "torch_dtype")
    outer = {key: config[key] for key in shared if key in config}
    config.clear()
    config.update({"model_type": kind, **outer, **dict(text or {})})
    return True


def closest(config: HuggingFaceConfig) -> str | None:
    """Return the family that computes all options of ``config`` and has most of its keys."""
    shared = dict[str, float]()
    for name in BUILT_IN:
        tried = deepcopy(config)  # transformers writes into the parts
        tried["architectures"] = None
        with suppress(ConfigError):
            family_named(name).read(tried, 1)
            keys = {field.name for field in fields(tried.defaults)}
            shared[name] = len(keys & config.keys()) / len(keys)
    return max(shared, key=shared.__getitem__, default=None)
