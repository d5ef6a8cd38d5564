"""Model families: one module each, whose ``FAMILY`` says how its Hugging Face folders are written.

Only this package knows a family by name. Everything else reads the ModelShape.
"""

from importlib import import_module

from rl.errors import require
from rl.model.families.family import Family

BUILT_IN = ("gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Model types of the families in this package, which are also the names of their modules."""


def family_named(name: str, *, field: str = "model.family") -> Family:
    """Return the family of a model type of BUILT_IN, or the ``FAMILY`` of the module ``name``.

    Raises ConfigError, naming ``field``, if ``name`` is neither.
    """
    module = f"{__name__}.{name}" if name in BUILT_IN else name
    rule = f"one of {', '.join(BUILT_IN)}, or a module with a rl.model.families.Family as FAMILY"
    try:
        family = getattr(import_module(module), "FAMILY", None)
    except ImportError as error:
        require(False, f"{name!r} cannot be imported: {error}", field=field, fix=f"name {rule}")
    problem = f"{name!r} has no FAMILY"
    require(isinstance(family, Family), problem, field=field, fix=f"name {rule}")
    return family  # type: ignore[return-value]
