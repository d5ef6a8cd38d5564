"""The dialect of a tokenizer's chat template."""

from itertools import product
from typing import TYPE_CHECKING

from rl.dialects.dialect import ConversationError, Dialect
from rl.dialects.plain_text import TextDialect
from rl.dialects.qwen3 import Qwen3Dialect
from rl.dialects.template import PROBES, difference, template_text
from rl.dialects.template_dialect import TemplateDialect
from rl.errors import ConfigError
from rl.model.tokenizer import load_tokenizer, require_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def dialect_of(model: "str | PreTrainedTokenizerFast") -> Dialect:
    """Return the dialect that renders exactly as the chat template of ``model``: a tokenizer, or
    a Hugging Face folder with one.

    Qwen3's is our own. A template that appends each turn gives one itself, as Llama 3's, Mistral's
    and Qwen2.5's do. The choice depends on what the template makes of sample conversations, not on
    the model's name. Raises ConfigError, naming ``model.hf_path``, if no dialect is exact.
    """
    tokenizer = load_tokenizer(model) if isinstance(model, str) else model
    require_chat_template(tokenizer)
    where = f"the chat template in {tokenizer.name_or_path!r}"
    reasons = []
    for thinks in (True, False):
        try:
            dialect = Qwen3Dialect(tokenizer, thinks=thinks)
            reason = _first_difference(dialect)
        except ConfigError as error:
            reason = error.problem
        if not reason:
            return dialect
        reasons.append(reason)
    try:
        return TemplateDialect(tokenizer)
    except (ConfigError, ConversationError) as error:
        problem = (
            f"{where} is neither Qwen3's ({reasons[0]}) nor one that only appends turns ({error})"
        )
    raise ConfigError(problem, field="model.hf_path", fix="use a model with such a template")


def dialect_or_text(model: "str | PreTrainedTokenizerFast") -> Dialect:
    """Return :func:`dialect_of` ``model``, or a dialect for plain text if no dialect is exact.

    The latter serves base models. It refuses messages with the error of :func:`dialect_of`. Raises
    ConfigError, naming ``model.hf_path``, if the tokenizer cannot be loaded or has no eos_token.
    """
    tokenizer = load_tokenizer(model) if isinstance(model, str) else model
    try:
        return dialect_of(tokenizer)
    except ConfigError as error:
        return TextDialect(tokenizer, str(error))


def _first_difference(dialect: Qwen3Dialect) -> str:
    """Return in words what the chat template does otherwise than ``dialect``; empty if nothing."""
    tokenizer = dialect.tokenizer
    for (messages, tools), prompt, thinking in product(PROBES, (False, True), (True, False)):
        if not dialect.thinks and any("reasoning_content" in message for message in messages):
            continue  # refused; the template would leave it out
        options = {"add_generation_prompt": prompt, "enable_thinking": thinking}
        try:
            text = template_text(tokenizer, messages, tools, **options)
        except ConversationError as error:
            return str(error)
        if reason := difference(tokenizer, dialect.render(messages, tools, **options).tokens, text):
            return reason
    return ""
