"""Tasks of questions in a JSONL file."""

from dataclasses import dataclass
from typing import ClassVar

from rl.tasks.chat import ChatTask


class ChatJsonl(ChatTask):
    """Task of a JSONL file with one question a line. A subclass reads the file and scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChatTask.Config):
        path: str = ""
        """JSONL file, one question a line."""

    config: Config
    field: ClassVar[str] = "path"
    unit: ClassVar[str] = "line"
