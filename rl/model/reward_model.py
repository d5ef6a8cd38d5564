"""Description of a reward model for transformers' sequence classification."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.model.families.family import REWARD_CLASS
from rl.model.hugging_face_config import read_json
from rl.model.tokenizer import (
    load_tokenizer,
    name_special_token,
    read_stop_token_ids,
    write_stop_tokens,
)

LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def reward_class(config: Mapping[str, Any]) -> str | None:
    """Return transformers' class of the reward model that ``config``, a config.json, describes;
    None for another model.
    """
    classes = config.get("architectures") or ()
    return next((name for name in classes if name.endswith(REWARD_CLASS)), None)


def describe_reward_model(folder: Path, model_class: str) -> None:
    """Change config.json in ``folder`` to describe a sequence classification with one label, of
    ``model_class`` of transformers, and choose the pad token.

    transformers scores a sequence at its last token that is not ``pad_token_id``. Tiller scores it
    at its last token. The scores are the same unless a sequence ends with the pad token. So
    if the pad token is missing or can stop an answer, another token becomes the pad token.
    """
    config = read_json("config.json", folder / "config.json")
    config |= {"architectures": [model_class], **LABELS}
    if (folder / "tokenizer.json").is_file():
        config["pad_token_id"] = _choose_pad_token(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def describe_stops(folder: Path, stops: Sequence[int]) -> None:
    """End generation from the model in ``folder`` at ``stops`` too. A reward model's pad token is
    none of them.
    """
    write_stop_tokens(folder, stops)
    if model_class := reward_class(read_json("config.json", folder / "config.json")):
        describe_reward_model(folder, model_class)


def _choose_pad_token(folder: Path) -> int | None:
    """Return the pad token: a token that no sequence ends with. Writes a new choice to the
    tokenizer's files.

    Returns None if the tokenizer has no such token. transformers then scores one sequence at a
    time.
    """
    tokenizer = load_tokenizer(str(folder))
    stops = read_stop_token_ids(tokenizer)
    if tokenizer.pad_token_id not in (None, *stops):
        return tokenizer.pad_token_id  # type: ignore[no-any-return]
    used = {*stops, tokenizer.bos_token_id, tokenizer.unk_token_id}
    added = tokenizer.added_tokens_decoder
    unused = [number for number, token in added.items() if token.special and number not in used]
    chosen = max(unused, default=None)
    if chosen is None:
        return None
    name_special_token(folder, "pad_token", chosen)
    return chosen
