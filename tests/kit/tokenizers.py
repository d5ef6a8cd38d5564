"""Tiny tokenizers with the control tokens and chat templates of real models."""

import copy
import importlib.util
import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tiny_model.py"
TEMPLATES = Path(__file__).with_name("templates")
LLAMA = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>"
    " <|python_tag|>"
)
MISTRAL = (
    "[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS]"
    " [/TOOL_RESULTS]"
)
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
    return _with("glm_4_5", f"{GLM} <arg_value> </arg_value> /nothink")


@cache
def llama3(template: str) -> PreTrainedTokenizerFast:
    """Return the same with tokens and a template of Llama 3."""
    tokenizer = _with(template, LLAMA)
    tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.eos_token = "<|end_of_text|>"
    return tokenizer


@cache
def tekken() -> PreTrainedTokenizerFast:
    """Return the same with tokens and template of Mistral Nemo."""
    tokenizer = _with("mistral_v3", f"{MISTRAL} <s> </s>")
    tokenizer.bos_token = "<s>"
    tokenizer.eos_token = "</s>"
    template = tokenizer.chat_template.replace(
        '" " + message["content"]|trim', 'message["content"]'
    )
    for spaced in ("[INST] ", "S] [", "S] {"):
        template = template.replace(spaced, spaced.replace(" ", ""))
    tokenizer.chat_template = template
    return tokenizer


@cache
def mistral() -> PreTrainedTokenizerFast:
    """Return a tokenizer as SentencePiece's, with the tokens and template of Mistral 7B."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    names = ["<unk>", "<s>", "</s>"]
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*names, *octets], show_progress=False
    )
    texts = (row["question"] for row in _script().make_problems(60, seed=0))
    bpe.train_from_iterator((f" {word}" for text in texts for word in text.split()), trainer)
    spec = json.loads(bpe.to_str())
    spec["added_tokens"] = [row for row in spec["added_tokens"] if row["content"] in names]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)), bos_token="<s>", eos_token="</s>"
    )
    return _with("mistral_v3", MISTRAL, tokenizer)


@cache
def chatml_mistral() -> PreTrainedTokenizerFast:
    """Return the same with tokens and template of Qwen2.5, as models trained from Mistral have."""
    words = "<|im_start|> <|im_end|> <tool_call> </tool_call>"
    return _with("qwen2_5", words, copy_of(mistral()))


@cache
def plain_family(template: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of :func:`qwen3` with another template."""
    return _with(template)


def copy_of(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return a tokenizer that can be changed without changing ``tokenizer``."""
    return copy.deepcopy(tokenizer)


def _with(
    template: str, words: str = "", tokenizer: PreTrainedTokenizerFast | None = None
) -> PreTrainedTokenizerFast:
    tokenizer = tokenizer or copy_of(qwen3())
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words.split()])
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
