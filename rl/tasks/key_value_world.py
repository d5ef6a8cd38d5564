"""Key-value world: an environment whose final state is scored."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any

from rl.environments.protocol import EnvironmentTask, MessageEnvironment, Reply, ToolEnvironment
from rl.environments.tools import Tools
from rl.types import Prompt
from rl.types.rules import at_least

LARGEST = 99
INSTRUCTION = "Change the store with the tools. Change nothing else. Answer without a call to end."


@dataclass(frozen=True, slots=True)
class _World:
    begin: Mapping[str, int]
    end: Mapping[str, int]
    request: str


class KeyValueWorld(EnvironmentTask):
    """Task whose policy changes a store of keys and numbers with tools, as the user asks.

    The reward is the share of the requested changes that the final store has. It is 0 if another
    key has changed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        keys: Annotated[int, at_least(1, 10_000)] = 6
        """Number of keys in the store at the begin."""

        changes: Annotated[int, at_least(1, 10_000)] = 2
        """Number of requested changes, each of another key; at most ``keys`` of them are made."""

    config: Config

    def prompt(self, prompt_id: int) -> Prompt:
        number = blake2b(f"{self.seed}/{prompt_id}".encode(), digest_size=6).digest()
        return self._prompt(prompt_id, 2 * int.from_bytes(number))

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [self._prompt(number, 2 * number + 1) for number in range(count)]

    def environment(self, prompt: Prompt, sample: int) -> MessageEnvironment:
        return _Store(self._world(int(prompt.answer)))

    def _prompt(self, prompt_id: int, number: int) -> Prompt:
        request = self._world(number).request
        return self.seed_prompt(prompt_id, text=request, answer=str(number))

    def _world(self, number: int) -> _World:
        """Return world ``number``; those of training are even, the held-out ones are odd."""
        draws = random.Random(f"key-value world/{number}")
        begin = {f"key{key}": draws.randint(0, LARGEST) for key in range(self.config.keys)}
        end = dict(begin)
        requests = []
        for key in draws.sample([*begin], min(self.config.changes, len(begin))):
            kind = draws.choice(("set", "add", "delete"))
            if kind == "delete":
                del end[key]
                requests.append(f"Delete {key}.")
                continue
            amount = draws.randint(1, LARGEST)
            end[key] = begin[key] + amount
            requests.append(
                f"Set {key} to {end[key]}." if kind == "set" else f"Add {amount} to {key}."
            )
        return _World(begin, end, " ".join(requests))


class _Store(ToolEnvironment):
    replayable = True

    def __init__(self, world: _World):
        self._world = world
        self._store = dict(world.begin)
        self.tools = Tools([self.get, self.set, self.delete])

    def get(self, key: str) -> int:
        """Return the number of a key."""
        return self._store[key]

    def set(self, key: str, value: int) -> str:
        """Set the number of a key."""
        self._store[key] = value
        return "done"

    def delete(self, key: str) -> str:
        """Delete a key."""
        del self._store[key]
        return "done"

    def begin(self) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": f"{self._world.request}\n{INSTRUCTION}"}]

    def finish(self, message: Mapping[str, Any]) -> Reply:
        """End the episode with the score of the store."""
        world = self._world
        asked = [key for key in world.begin if world.begin[key] != world.end.get(key)]
        right = sum(self._store.get(key) == world.end.get(key) for key in asked)
        others = {key: self._store[key] for key in self._store if key not in asked}
        unchanged = others == {key: world.begin[key] for key in world.begin if key not in asked}
        reward = right / len(asked) if unchanged else 0.0
        return Reply(reward=reward, correct=reward == 1.0, done=True)
