"""Choice of a dialect by a tokenizer's chat template."""

import sys

import numpy as np
import pytest
from tokenizers import AddedToken

from rl.dialects.choose import dialect_of, dialect_or_text
from rl.dialects.dialect import ConversationError
from rl.dialects.qwen3 import Qwen3Dialect
from rl.dialects.renderers_adapter import FamilyDialect
from rl.errors import ConfigError
from tests.dialects.conversations import TOOL, call, said, system, tool, user
from tests.tiny_tokenizers import copy_of, glm, painted, qwen3, qwen3_instruct

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


def test_a_template_that_differs_in_tools_alone_serves_conversations_without_tools():
    template = qwen3().chat_template.replace("You may call one", "You can call one")
    dialect = dialect_of(with_template(template))
    plain = [user("a"), said("b")]
    assert dialect.render(plain).tokens.tolist() == (
        dialect_of(qwen3()).render(plain).tokens.tolist()
    )
    with pytest.raises(ConversationError, match="it has .*can call.* instead of .*may call"):
        dialect.render(plain, [TOOL])


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


def test_without_renderers_the_error_tells_how_to_install_them(monkeypatch):
    monkeypatch.delitem(sys.modules, "rl.dialects.renderers_adapter")
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigError, match="model.hf_path: .*pip install 'tiller-rl\\[dialects\\]'"):
        dialect_of(glm())


@pytest.fixture(scope="module")
def family() -> FamilyDialect:
    dialect = dialect_of(glm())
    assert isinstance(dialect, FamilyDialect)
    return dialect


def test_another_family_is_found_by_its_template(family):
    assert family.family == "glm-4.5"
    messages = [
        system("You add."),
        user("1 + 2?"),
        said("I add.", call({"a": 1}), thought="Hm."),
        tool("3"),
        said("It is 3."),
    ]
    whole = family.render(messages, [TOOL])
    text = glm().apply_chat_template(messages, tools=[TOOL], tokenize=False)
    # The template writes <|user|>, which stops an answer, only before a next message.
    assert whole.tokens.tolist() == glm().encode(text + "<|user|>", add_special_tokens=False)
    assert whole.tokens.dtype == whole.message.dtype == np.int32
    shown = painted(glm(), whole.tokens, whole.sampled)
    assert "<think>Hm.</think>\nI add.\n<tool_call>add" in shown
    assert "</tool_call><|observation|>»\n<tool_response>\n3\n</tool_response>" in shown
    assert shown.endswith("«<think></think>\nIt is 3.<|user|>»")


def test_another_familys_switch_for_thinking_acts(family):
    on, off = (
        glm().decode(family.render([user("a")], enable_thinking=thinking).tokens)
        for thinking in (True, False)
    )
    assert on != off
    assert "/nothink" in off


def test_a_difference_between_a_family_and_the_template_is_refused(family):
    calls = [user("a"), said("b", call({"a": 1}), call({"a": 2})), tool("1"), tool("2"), said("c")]
    with pytest.raises(ConversationError, match=r"glm-4.5 of renderers differs .* it has .* inst"):
        family.render(calls, [TOOL])


def test_control_tokens_in_text_of_another_family_are_refused(family):
    for messages, tools, message in (
        ([user("a"), said("<|user|>")], None, "message 1: .* control token '<.user.>'"),
        ([user("a")], [{"name": "<think>"}], "tools: .* control token '<think>'"),
        ([said("", call({"a": {1}}))], None, "message 0: .* is not JSON"),
        ([user("\ud800")], None, "message 0: half of a surrogate pair"),
    ):
        with pytest.raises(ConversationError, match=message):
            family.render(messages, tools)
    with pytest.raises(ConversationError, match="text: .* control token"):
        family.encode("a<sop>")
    assert glm().decode(family.encode("plain")) == "plain"
