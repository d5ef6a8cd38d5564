"""Choice of a dialect by a tokenizer's chat template."""

import pytest
from tokenizers import AddedToken

from rl.dialects.choose import dialect_of, dialect_or_text
from rl.dialects.dialect import ConversationError
from rl.dialects.qwen3 import Qwen3Dialect
from rl.errors import ConfigError
from tests.kit.conversations import said, user
from tests.kit.tokenizers import copy_of, glm, qwen3, qwen3_instruct

OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def with_template(template: str):
    tokenizer = copy_of(qwen3())
    tokenizer.chat_template = template
    return tokenizer


def test_qwen3_has_our_own_dialect():
    dialect = dialect_of(qwen3())
    assert isinstance(dialect, Qwen3Dialect)
    assert dialect.thinks
    assert qwen3().convert_ids_to_tokens(dialect.stop_token_ids) == ["<|im_end|>", "<|endoftext|>"]
    instruct = dialect_of(qwen3_instruct())
    assert isinstance(instruct, Qwen3Dialect)
    assert not instruct.thinks


def test_a_template_that_differs_by_a_word_is_refused_with_the_difference():
    template = qwen3().chat_template.replace("system\\n", "System\\n")
    with pytest.raises(ConfigError, match="model.hf_path: .* neither Qwen3's .*it has .*System"):
        dialect_of(with_template(template))


@pytest.mark.parametrize("template", [OTHER, "{{ raise_exception('no') }}", "{{ 1 / 0 }}"])
def test_templates_of_no_known_family_are_refused(template):
    with pytest.raises(ConfigError, match="model.hf_path: the chat template in .* is neither"):
        dialect_of(with_template(template))


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ConfigError, match="model.hf_path: .* has no chat template"):
        dialect_of(with_template(""))


def test_a_folder_and_its_tokenizer_give_the_same_dialect(tmp_path):
    qwen3().save_pretrained(tmp_path)
    dialect = dialect_of(str(tmp_path))
    assert isinstance(dialect, Qwen3Dialect)
    messages = [user("a"), said("b")]
    ours = dialect_of(qwen3()).render(messages)
    assert dialect.render(messages).tokens.tolist() == ours.tokens.tolist()
    with pytest.raises(ConfigError, match="model.hf_path: '/nowhere' has no tokenizer.json"):
        dialect_of("/nowhere")


def test_base_models_have_a_dialect_for_text_alone():
    assert isinstance(dialect_or_text(qwen3()), Qwen3Dialect)
    dialect = dialect_or_text(with_template(""))
    assert qwen3().decode(dialect.encode("plain")) == "plain"
    with pytest.raises(ConversationError, match="model.hf_path: .* has no chat template"):
        dialect.render([user("a")])
    with pytest.raises(ConversationError, match="text: .* control token '<think>'"):
        dialect.encode("<think>")
    endless = with_template("")
    endless.eos_token = None
    with pytest.raises(ConfigError, match="model.hf_path: .* has no eos_token"):
        dialect_or_text(endless)


def test_added_tokens_of_white_space_are_no_control_tokens():
    tokenizer = with_template("")
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    dialect = dialect_or_text(tokenizer)
    assert tokenizer.decode(dialect.encode("a    b")) == "a    b"


def test_a_template_that_no_dialect_renders_exactly_is_refused_with_the_reasons():
    message = "model.hf_path: .* is neither Qwen3's .* nor one that only appends turns .*; use a"
    with pytest.raises(ConfigError, match=message):
        dialect_of(glm())
