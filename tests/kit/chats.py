"""A tiny model that chats, and conversations for it."""

from pathlib import Path
from typing import Any

from tests.kit.tokenizers import make_model


def tiny_chat_model(folder: Path) -> Path:
    """Write a tiny Qwen3 with Qwen3's control tokens and chat template; return its folder."""
    model = make_model(folder, "--lines", "200")
    (folder / "data").rename(folder / "problems.jsonl")
    return model.rename(folder / "tiny")


def examples_fields(model: Path, **fields: Any) -> dict[str, Any]:
    """Return the fields of a config of four steps on four examples each."""
    return {
        "model.hf_path": str(model),
        "model.max_seq_len": 128,
        "task.max_tokens": 96,
        "task.held_out_fraction": 0.2,
        "examples_per_step": 4,
        "steps": 4,
        "validate_every": 0,
        "quiet": True,
        **fields,
    }


def chat_rows(count: int) -> list[dict]:
    """Return ``count`` conversations about sums, each with another sum."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} plus {number * 7 % 10}?"},
                {"role": "assistant", "content": str(number + number * 7 % 10)},
            ]
        }
        for number in range(count)
    ]


def preference_rows(count: int) -> list[dict]:
    """Return ``count`` questions about sums. The chosen answers are right."""
    return [
        {
            "prompt": row["messages"][:1],
            "chosen": row["messages"][1:],
            "rejected": [{"role": "assistant", "content": f"no idea {number}"}],
        }
        for number, row in enumerate(chat_rows(count))
    ]


def labelled_rows(count: int) -> list[dict]:
    """Return the answers of ``preference_rows``, one by one, with their labels."""
    return [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in preference_rows(count)
        for name in ("chosen", "rejected")
    ]
