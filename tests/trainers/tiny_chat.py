"""A tiny model that chats, and conversations for it."""

from pathlib import Path

from tests.tiny_tokenizers import make_model


def tiny_chat_model(folder: Path) -> Path:
    """Write a tiny Qwen3 with Qwen3's control tokens and chat template; return its folder."""
    model = make_model(folder, "--lines", "200")
    (folder / "data").rename(folder / "problems.jsonl")
    return model.rename(folder / "tiny")


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
