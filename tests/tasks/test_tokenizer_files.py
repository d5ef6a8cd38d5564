"""Damaged tokenizer files of a model folder are a ConfigError that names the file and says what is
wrong.
"""

import json
import shutil
from pathlib import Path

import pytest

from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl


def text(content: str):
    return lambda path: path.write_text(content)


def keys(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BROKEN = [
    ("tokenizer.json", text('{"a": '), "tokenizer.json cannot be read: Expecting value"),
    ("tokenizer.json", text("[]"), "tokenizer.json holds a list; it must be a JSON object"),
    (
        "tokenizer.json",
        text("{}"),
        "the tokenizer in .* cannot be loaded: KeyError: 'added_tokens'",
    ),
    (
        "tokenizer.json",
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        "tokenizer.json cannot be read",
    ),
    (
        "config.json",
        keys(vocab_size=100),
        "vocab_size: 100 is smaller than the tokenizer's .* that model",
    ),
    (
        "tokenizer_config.json",
        text('{"a": '),
        "tokenizer_config.json cannot be read: Expecting value",
    ),
    (
        "tokenizer_config.json",
        text("[]"),
        "tokenizer_config.json holds a list; it must be a JSON object",
    ),
    (
        "tokenizer_config.json",
        keys(eos_token=5),
        "cannot be loaded: TypeError: Special token eos_token has to be",
    ),
    (
        "tokenizer_config.json",
        keys(added_tokens_decoder={"0": 5}),
        "cannot be loaded: TypeError: Found a <class 'int'>",
    ),
    (
        "chat_template.jinja",
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        "cannot be loaded: UnicodeDecodeError",
    ),
    (
        "chat_template.jinja",
        text("{% for m in messages %}{{ m }"),
        "chat template .* TemplateSyntaxError: .* in line 1",
    ),
    (
        "chat_template.jinja",
        text("{{ messages[5].content }}"),
        "chat template .* UndefinedError: list object has no",
    ),
    (
        "chat_template.jinja",
        text("{{ raise_exception('No.') }}"),
        "chat template .* TemplateError: No.",
    ),
    (
        "generation_config.json",
        text("{"),
        "generation_config.json cannot be read: Expecting property name",
    ),
    (
        "generation_config.json",
        text("[]"),
        "generation_config.json holds a list; it must be a JSON object",
    ),
    (
        "generation_config.json",
        make_folder,
        "generation_config.json cannot be read: .*Is a directory",
    ),
    *[
        (
            "generation_config.json",
            keys(eos_token_id=value),
            "eos_token_id in .*generation_config.json is .*; it must",
        )
        for value in ("x", ["x"], -1, True, 2.0, [2, 151_645])
    ],
]


@pytest.mark.parametrize(("file", "damage", "message"), BROKEN)
def test_a_damaged_tokenizer_file_is_refused_with_its_name(tiny, tmp_path, file, damage, message):
    folder = Path(shutil.copytree(tiny[0], tmp_path / "model"))
    damage(folder / file)
    with pytest.raises(ConfigError, match=f"^model.*{message}"):
        Gsm8kJsonl.Config(path=str(tiny[1])).build(seed=0, model=ModelConfig(hf_path=str(folder)))


def test_stop_tokens_outside_the_vocabulary_are_refused(tiny):
    task = Gsm8kJsonl.Config(path=str(tiny[1])).build(
        seed=0, model=ModelConfig(hf_path=str(tiny[0]))
    )
    size = task.shape.vocab_size
    with pytest.raises(
        ConfigError, match=rf"stop tokens \[2, {size}\]; they must be token ids below {size}"
    ):
        task.set_tokenizer(task.tokenizer, [2, size])
