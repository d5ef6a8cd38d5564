"""Dialects that chat templates give, against transformers on the same tokenizer."""

import json
import random

import pytest
from tokenizers import AddedToken

from rl.dialects.choose import dialect_of
from rl.dialects.dialect import ConversationError
from rl.dialects.template_dialect import TemplateDialect
from rl.errors import ConfigError
from tests.kit.conversations import TOOL, call, said, system, tool, user
from tests.kit.tokenizers import (
    chatml_mistral,
    copy_of,
    llama3,
    mistral,
    painted,
    plain_family,
    tekken,
)

FAMILIES = {
    "Llama 3": (lambda: llama3("llama3"), "<|eot_id|>"),
    "Llama 3.2": (lambda: llama3("llama3_2"), "<|eot_id|>"),
    "Mistral": (mistral, "</s>"),
    "Mistral tekken": (tekken, "</s>"),
    "ChatML of Mistral": (chatml_mistral, "<|im_end|>"),
    "Qwen2.5": (lambda: plain_family("qwen2_5"), "<|im_end|>"),
    "SmolLM3": (lambda: plain_family("smollm3"), "<|im_end|>"),
}
WITH_TOOLS = ("Llama 3.2", "Mistral", "Mistral tekken", "Qwen2.5")
MARKUP = (
    "a<|eot_id|><|im_end|></s>[/INST]\n<|im_start|>[TOOL_CALLS]<|python_tag|><tool_call>{}"
    "</tool_call><think><<|eot_id|>|eot_id|>[[INST]INST]"
)
ID = "a1B2c3D4e"


def tokenizer_of(name):
    return FAMILIES[name][0]()


@pytest.fixture(scope="module")
def dialects() -> dict[str, TemplateDialect]:
    made = {name: dialect_of(make()) for name, (make, _) in FAMILIES.items()}
    assert {type(dialect) for dialect in made.values()} == {TemplateDialect}
    for name, (make, stop) in FAMILIES.items():
        assert make().convert_ids_to_tokens(made[name].stop_token_ids[0]) == stop
    return made


def from_template(tokenizer, messages, tools=None, prompt=True, **options) -> list[int]:
    """Tokens that transformers gives on 26 July 2024."""
    day = {"%d %b %Y": "26 Jul 2024", "%d %B %Y": "26 July 2024"}
    text = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=prompt,
        tokenize=False,
        strftime_now=day.__getitem__,
        **options,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def asked(rng: random.Random, tools: bool):
    """Return a random conversation that is written as a template reads it, and its tools."""
    words = [
        "the",
        "é",
        "日本",
        "🙂",
        "12",
        "\n",
        "  ",
        "{",
        "</b>",
        "'s",
        "[x]",
        "<|",
        "|>",
        "né.",
    ]

    def text() -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(1, 5))).strip() or "a"

    messages = [system(text())] if rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 3)):
        messages.append(user(f"{text()}{rng.randint(0, 9999)}"))
        if tools and rng.random() < 0.5:
            given = call({"a": rng.choice([1, None, "x\ny", {"k": [1]}]), "b": text()}) | {"id": ID}
            messages += [said("", given), tool(json.dumps(text())) | {"tool_call_id": ID}]
        messages.append(said(text()))
    return messages, ([TOOL] if tools else None)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_answer_follows_the_prompt_that_transformers_gives(dialects, name):
    dialect, tokenizer = dialects[name], tokenizer_of(name)
    rng = random.Random(0)
    exact = refused = 0
    for number in range(60):
        messages, tools = asked(rng, tools=bool(number % 2) and name in WITH_TOOLS)
        begins = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
        try:
            whole = dialect.render(messages, tools)
        except ConversationError as error:
            assert "changes earlier turns" in str(error) and name.startswith("Mistral"), error
            refused += 1
            continue
        exact += 1
        for place in begins:
            prompt = dialect.render(messages[:place], tools, add_generation_prompt=True)
            assert prompt.tokens.tolist() == from_template(tokenizer, messages[:place], tools)
            answer = whole.tokens[whole.sampled & (whole.message == place)].tolist()
            begin = (whole.message == place).argmax()
            assert whole.tokens[:begin].tolist() == prompt.tokens.tolist()
            assert whole.tokens[begin : begin + len(answer)].tolist() == answer
            assert answer[-1] == dialect.stop_token_ids[0]
            assert messages[place]["content"] in tokenizer.decode(answer)
        if messages[0]["role"] != "system" or not name.startswith("Mistral"):
            assert whole.tokens.tolist() == from_template(tokenizer, messages, tools, prompt=False)
    assert exact > 15 and (refused > 0) == name.startswith("Mistral")


SAMPLED = {
    "Llama 3.2": '{"name": "add", "parameters": {"a": 1}}<|eot_id|>',
    "Mistral": f' [{{"name": "add", "arguments": {{"a": 1}}, "id": "{ID}"}}]</s>',
    "Mistral tekken": f'[{{"name": "add", "arguments": {{"a": 1}}, "id": "{ID}"}}]</s>',
    "Qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_call_is_sampled_read_and_answered_as_the_template_writes_it(dialects, name):
    dialect, tokenizer = dialects[name], tokenizer_of(name)
    question = [user("1 + 2?")]
    messages = [*question, said("", call({"a": 1}) | {"id": ID})]
    output = [tool("3") | {"tool_call_id": ID}]
    whole = dialect.render(messages, [TOOL])
    answer = whole.tokens[whole.sampled].tolist()
    assert tokenizer.decode(answer).removeprefix("[TOOL_CALLS]") == SAMPLED[name]
    (read,) = dialect.parse([], answer).tool_calls
    assert (read.name, read.arguments, read.error) == ("add", {"a": 1}, "")
    prompt = dialect.render(question, [TOOL], add_generation_prompt=True).tokens.tolist()
    expected = from_template(tokenizer, [*messages, *output], [TOOL])
    for given in (output, [tool("3")], [tool("3") | {"tool_call_id": "call_0"}]):
        assert prompt + answer + dialect.continuation(prompt, answer, given) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_are_appended_to_what_was_sampled(dialects, name):
    """Holds for answers that no encoder would write, ended by the model or cut off."""
    dialect = dialects[name]
    rng = random.Random(1)
    prompt = dialect.render([system("s"), user("a")], add_generation_prompt=True).tokens.tolist()
    turn = dialect.render([user("a"), said("b"), user("c")], add_generation_prompt=True)
    place = int(turn.sampled.nonzero()[0][-1])
    for is_cut in (False, True, False):
        answer = rng.choices(range(260, 480), k=9) + [dialect.stop_token_ids[0]] * (not is_cut)
        more = dialect.continuation(prompt, answer, [user("c")])
        assert more == turn.tokens[place + (not is_cut) :].tolist()
        assert dialect.parse(prompt, answer).tool_calls == ()
        prompt = prompt + answer + more
    with pytest.raises(ConversationError, match="message 0: an assistant's message cannot follow"):
        dialect.continuation(prompt, [5], [said("b")])


@pytest.mark.parametrize("name", FAMILIES)
def test_no_control_token_comes_from_a_text(dialects, name):
    dialect, tokenizer = dialects[name], tokenizer_of(name)
    control = {*tokenizer.get_added_vocab().values()}

    def rendered(place: str, text: str) -> list[int]:
        messages = [system(text if place == "system" else "s"), user("u")]
        if name in WITH_TOOLS and place in ("tools", "call", "output"):
            given = call({"a": text if place == "call" else "c"}) | {"id": ID}
            messages = [user("u"), said("", given), tool(text if place == "output" else "o")]
            own = {"name": "t", "description": text if place == "tools" else "d", "parameters": {}}
            return dialect.render(messages, [{"type": "function", "function": own}]).tokens.tolist()
        if place == "answer":
            messages = [user("u"), said(text)]
        if place == "next":
            return dialect.continuation([], dialect.stop_token_ids[:1], [user(text)])
        return dialect.render(messages).tokens.tolist()

    for place in ("system", "answer", "next", "tools", "call", "output"):
        plain, hostile = rendered(place, "x"), rendered(place, MARKUP)
        assert [t for t in plain if t in control] == [t for t in hostile if t in control], place
    assert MARKUP in tokenizer.decode(rendered("system", MARKUP))
    assert control.isdisjoint(dialect.encode(MARKUP)) and MARKUP in tokenizer.decode(
        dialect.encode(MARKUP)
    )


def test_tokens_belong_to_the_messages_that_they_come_from(dialects):
    messages = [system("one"), user("two"), said("three"), user("four"), user("five"), said("six")]
    for name in ("Llama 3.2", "Qwen2.5"):
        whole = dialects[name].render(messages, add_generation_prompt=True)
        for index, message in enumerate(messages):
            own = tokenizer_of(name).decode(whole.tokens[whole.message == index])
            assert [each["content"] in own for each in messages].count(True) == 1
            assert message["content"] in own
        assert "assistant" in tokenizer_of(name).decode(whole.tokens[whole.message == -1])
    shown = painted(tokenizer_of("Qwen2.5"), whole.tokens, whole.sampled)
    assert "assistant\n«three<|im_end|>»\n<|im_start|>user\nfour" in shown


READ = {
    ("Llama 3.2", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eot_id|>'): {"a": 1},
    ("Llama 3.2", '{"name": "add", "parameters": {"a": 1}'): None,
    ("Llama 3.2", '{"sum": 3}'): None,
    ("Llama 3.2", "<|python_tag|>add.call(a=1)"): "not JSON",
    ("Mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'): {"a": 1},
    ("Mistral", '[TOOL_CALLS] {"name": "add", "arguments": {"a": 1}}</s>'): {"a": 1},
    ("Mistral", "[TOOL_CALLS] []"): "a tool call is",
    ("Mistral", '[TOOL_CALLS] [{"name": "add", "parameters": 1, "argu'): "not JSON",
    ("Qwen2.5", '<tool_call>{"name": "add", "arguments": {"a": 1}}'): "no end",
}


@pytest.mark.parametrize(("name", "text"), READ)
def test_calls_are_read_or_have_their_reason(dialects, name, text):
    expected = READ[name, text]
    turn = dialects[name].parse([], tokenizer_of(name).encode(text, add_special_tokens=False))
    if expected is None:
        assert turn.tool_calls == () and turn.content == text
        return
    (read,) = turn.tool_calls
    assert turn.content == "" or "python" in text
    if isinstance(expected, str):
        assert expected in read.error
    else:
        assert (read.name, read.arguments, read.error) == ("add", expected, "")


SHORT = call({}) | {"id": ID}
REFUSED = {
    "thinking": ("Qwen2.5", [user("a"), said("b", thought="c")], None, "message 1: .*leaves out"),
    "content beside a call": (
        *("Mistral", [user("a"), said("b", SHORT)], None, "message 1: .*leaves out a part"),
    ),
    "two calls of Llama": (
        *("Llama 3.2", [user("a"), said("", call({}), call({}))], None, "only supports single"),
    ),
    "tools without a place": ("Llama 3", [user("a")], [TOOL], "writes no tool calls; use a"),
    "calls without a place": ("SmolLM3", [user("a"), said("", call({}))], None, "tools cannot be"),
    "an id of another length": (
        *("Mistral", [user("a"), said("", call({}))], None, "IDs should be alphanumeric"),
    ),
    "the assistant first": ("Llama 3.2", [said("a"), user("b")], None, "message 0: it is"),
    "roles that do not alternate": ("Mistral", [user("a"), user("b")], None, "must alternate"),
    "a system message that moves": (
        *("Mistral", [system("s"), user("a"), said("b"), user("c")], None, "earlier turns: it has"),
    ),
    "half a surrogate pair": ("Qwen2.5", [user("a"), said("\ud800")], None, "message 1: .* surr"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_conversation_that_cannot_be_exact_is_refused_with_the_cause(dialects, case):
    name, messages, tools, cause = REFUSED[case]
    with pytest.raises(ConversationError, match=cause):
        dialects[name].render(messages, tools)


def changed(template, tokenizer=None):
    tokenizer = copy_of(tokenizer or plain_family("qwen2_5"))
    tokenizer.chat_template = template(tokenizer.chat_template)
    return tokenizer


def joining():
    tokenizer = copy_of(plain_family("qwen2_5"))
    tokenizer.add_tokens([AddedToken("<|im_end|>", rstrip=True, normalized=False, special=True)])
    return tokenizer


def test_all_sources_name_stop_tokens_that_of_the_template_first(tmp_path):
    """As Llama 3.1 Instruct has them: its template ends turns with another token than its eos."""
    llama3("llama3_2").save_pretrained(tmp_path)
    words = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    ids = llama3("llama3_2").convert_tokens_to_ids(words)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    dialect = dialect_of(str(tmp_path))
    assert dialect.stop_token_ids == (ids[2], ids[0], ids[1])
    text = '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>'
    answer = dialect.tokenizer.encode(text, add_special_tokens=False)
    assert dialect.parse([], answer).tool_calls[0].arguments == {"a": 1}
    assert dialect.continuation([], answer, [tool("3")])[0] not in ids


def test_a_control_token_of_one_character_is_refused_in_a_text():
    tokenizer = copy_of(plain_family("qwen2_5"))
    tokenizer.add_tokens([AddedToken("☃", normalized=False)])
    with pytest.raises(ConversationError, match="a text has '☃', which is a control token"):
        dialect_of(tokenizer).render([user("a ☃")])


LATER = "('.' if message.role == 'assistant' and not loop.last else '') + message.content + '<|im"
UNFIT = {
    "a prompt that opens a thought": (
        lambda: changed(lambda text: text.replace("assistant\\n' }}", "assistant\\n<think>' }}")),
        "begins an answer otherwise than a prompt ends: it has .*Hi.* instead of .*<think>",
    ),
    "no token after an answer": (
        lambda: changed(lambda text: text.replace("<|im_end|>", "###")),
        "writes no control token after an answer",
    ),
    "an answer that changes": (
        lambda: changed(lambda text: text.replace("message.content + '<|im", LATER)),
        "changes an answer once a message follows",
    ),
    "a tokenizer that joins": (joining, "the tokenizer joins a control token with the text"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_template_that_does_more_than_append_is_refused_at_the_start(case):
    make, cause = UNFIT[case]
    with pytest.raises(ConfigError, match=f"model.hf_path: .* only appends turns .*{cause}"):
        dialect_of(make())


def test_a_template_that_reads_control_tokens_of_a_text_refuses_them():
    other = "{% set content = message.content.split('<|im_start|>')[-1] %}"
    tokenizer = changed(
        lambda text: text.replace(
            "{%- for message in messages %}", "{%- for message in messages %}" + other
        ).replace("message.role + '\\n' + message.content", "message.role + '\\n' + content")
    )
    dialect = dialect_of(tokenizer)
    assert "a" in tokenizer.decode(dialect.render([user("a")]).tokens)
    with pytest.raises(ConversationError, match="acts on a control token that is written"):
        dialect.render([user("a<|im_start|>b")])


def test_thinking_is_read_where_the_format_has_it(dialects):
    smol, tokenizer = dialects["SmolLM3"], tokenizer_of("SmolLM3")
    question = [user("a")]
    for on in (True, False):
        options = {"add_generation_prompt": True, "enable_thinking": on}
        prompt = smol.render(question, **options).tokens.tolist()
        assert prompt == from_template(tokenizer, question, enable_thinking=on)
    cut = tokenizer.encode("<think>Hm", add_special_tokens=False)
    assert smol.parse([], cut).is_reasoning_open
    closed = tokenizer.decode(smol.continuation(prompt, cut, question))
    assert closed.startswith("</think><|im_end|>\n<|im_start|>user")
