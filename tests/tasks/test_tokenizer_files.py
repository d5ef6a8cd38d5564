"""Damaged tokenizer files of a model folder are a ConfigError that names the file."""

import json
import shutil
from pathlib import Path

import pytest

from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl


def text(content: str | bytes):
    data = content.encode() if isinstance(content, str) else content
    return lambda path: path.write_bytes(data)


def keys(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
NO_TEXT = b"\xff\xfe\x00"
BROKEN = [
    (TOKENIZER, Path.unlink, "has no tokenizer.json"),
    (TOKENIZER, text('{"a": '), "tokenizer.json cannot be read: Expecting value"),
    (TOKENIZER, text("[]"), "tokenizer.json holds a list; it must be a JSON object"),
    (TOKENIZER, text("{}"), "the tokenizer in .* cannot be loaded: KeyError: 'added_tokens'"),
    (TOKENIZER, text(NO_TEXT), "tokenizer.json cannot be read"),
    ("config.json", keys(vocab_size=100), "vocab_size: 100 is smaller than the tok.* that model"),
    (CONFIG, text('{"a": '), "tokenizer_config.json cannot be read: Expecting value"),
    (CONFIG, text("[]"), "tokenizer_config.json holds a list; it must be a JSON object"),
    (CONFIG, keys(eos_token=5), "cannot be loaded: TypeError: Special token eos_token has to be"),
    (CONFIG, keys(added_tokens_decoder={"0": 5}), "be loaded: TypeError: Found a <class 'int'>"),
    (TEMPLATE, Path.unlink, "no chat template"),
    (TEMPLATE, text(NO_TEXT), "cannot be loaded: UnicodeDecodeError"),
    (TEMPLATE, text("{% for m in messages %}{{ m }"), "TemplateSyntaxError: .* in line 1"),
    (TEMPLATE, text("{{ messages[5].content }}"), "UndefinedError: list object has no"),
    (TEMPLATE, text("{{ raise_exception('No.') }}"), "chat template fails: .*TemplateError: No."),
    (GENERATION, text("{"), "generation_config.json cannot be read: Expecting property name"),
    (GENERATION, text("[]"), "generation_config.json holds a list; it must be a JSON object"),
    (GENERATION, make_folder, "generation_config.json cannot be read: .*Is a directory"),
    *[
        (GENERATION, keys(eos_token_id=value), "eos_token_id in .*config.json is .*; it must")
        for value in ("x", ["x"], -1, True, 2.0, [2, 151_645])
    ],
]


@pytest.mark.parametrize(("file", "damage", "message"), BROKEN)
def test_a_damaged_tokenizer_file_is_refused_with_its_name(tiny, tmp_path, file, damage, message):
    folder = Path(shutil.copytree(tiny[0], tmp_path / "model"))
    damage(folder / file)
    with pytest.raises(ConfigError, match=f"^model.*{message}"):
        Gsm8kJsonl.Config(path=str(tiny[1])).build(seed=0, model=ModelConfig(hf_path=str(folder)))
