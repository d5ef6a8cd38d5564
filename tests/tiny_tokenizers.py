"""Tiny tokenizers with the control tokens and chat templates of real models."""

import copy
import importlib.util
from functools import cache
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_tiny_model.py"
TEMPLATES = Path(__file__).parent / "dialects" / "templates"
GLM = "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <arg_key> </arg_key>"


@cache
def _script():
    spec = importlib.util.spec_from_file_location("make_tiny_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def qwen3() -> PreTrainedTokenizerFast:
    """Return the tokenizer that ``scripts/make_tiny_model.py`` writes, with Qwen3's template."""
    return _script().train_tokenizer(_script().make_problems(60, seed=0))


@cache
def qwen3_instruct() -> PreTrainedTokenizerFast:
    """Return the same with the template of the instruction models, which do not think."""
    return _with("qwen3_instruct")


@cache
def glm() -> PreTrainedTokenizerFast:
    """Return the same with tokens and template of GLM-4.5."""
    tokenizer = _with("glm_4_5")
    words = f"{GLM} <arg_value> </arg_value> /nothink".split()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def copy_of(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return a tokenizer that can be changed without changing ``tokenizer``."""
    return copy.deepcopy(tokenizer)


def _with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = copy_of(qwen3())
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


def painted(tokenizer: PreTrainedTokenizerFast, tokens, mask) -> str:
    """Return the text with the masked parts in «»."""
    text = ""
    inside = False
    run: list[int] = []
    for token, counts in [*zip(tokens, mask, strict=True), (None, None)]:
        if (run and bool(counts) != inside) or token is None:
            part = tokenizer.decode(run)
            text += f"«{part}»" if inside and run else part
            run = []
        inside = bool(counts)
        run.append(int(token) if token is not None else 0)
    return text


def make_model(folder: Path, *options: str) -> Path:
    """Write the model of ``scripts/make_tiny_model.py`` into ``folder``; return its path."""
    path = folder / "model"
    data = str(folder / "data")
    _script().main(["--model-dir", str(path), "--data", data, "--lines", "60", *options])
    return path
