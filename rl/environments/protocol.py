"""Protocol between a run and an environment, which answers the policy over several turns."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn

from rl.dialects.choose import dialect_of
from rl.environments.task import Task
from rl.environments.tools import Tools
from rl.errors import require
from rl.metrics import Entry
from rl.model.shape import ModelConfig
from rl.model.tokenizer import write_stop_tokens
from rl.types import Completion, EpisodeStop, Prompt
from rl.types.rules import SECONDS, at_least

Message = Mapping[str, Any]
"""Message in the form of the Chat Completions API, with ``reasoning_content`` for thinking."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Begin of an episode."""

    messages: Sequence[Message]
    """Messages before the first answer; the last one is of the user."""

    tools: Sequence[Message] = ()
    """JSON schemas of the tools that the policy may call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Response of an environment to one answer of the policy."""

    messages: Sequence[Message] = ()
    """Messages before the next answer, one of role ``tool`` for each tool call; at least one unless
    ``done``."""

    reward: float | None = 0.0
    """Number that is added to the reward of the episode. None abstains: the episode leaves its
    group."""

    earlier: Mapping[int, float] = field(default_factory=dict)
    """Numbers that are added to the rewards of earlier answers, by their numbers from 0, such as
    what another player loses by this answer."""

    done: bool = False
    """Whether the episode ends here."""

    correct: bool = False
    """Whether the episode is solved, as counted by evaluation; the last step decides."""

    metrics: Mapping[str, Entry] = field(default_factory=dict)
    """Numbers that replace those of earlier steps, as :attr:`Score.metrics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReply(Reply):
    """Response of an environment that writes prompts in tokens."""

    tokens: Sequence[int] = ()
    """All tokens before the next answer, unless ``done``. They need not begin with those before:
    then the history was rewritten, and a new sequence begins."""

    max_tokens: int | None = None
    """Maximum length of the next answer; at most ``rollout.max_tokens`` in any case."""

    top_logprobs: int = 0
    """Number of most likely tokens whose log-probs the next answer has, 0 to 20."""

    stop: Sequence[str] = ()
    """Texts that end the next answer; the token that completes one is a part of the answer."""

    min_tokens: int = 0
    """Number of tokens of the next answer before which no stop token is sampled."""

    json_schema: str | None = None
    """Schema of the JSON that the next answer is, as JSON; None for any text. The sampling masks
    of the answer have the tokens that go on with such an answer."""

    player: int | None = None
    """Number of the player of a game who answers next, from 0; None without players. The answers
    of a player are in sequences of the player's own."""

    stop_reason: EpisodeStop = "done"
    """Reason for the end, if ``done``."""


class Environment(ABC):
    """One episode.

    Each method may be a coroutine function. Other methods run in a thread, one call of an episode
    at a time. An exception costs the group of the episode: a failure that is not the policy's, such
    as a lost server, is to be raised, not answered.
    """

    replayable: ClassVar[bool] = False
    """Whether a new environment of the same prompt and sample gives the same replies to the same
    answers, without effects outside of it. If its worker is lost, the episode is replayed instead
    of begun again."""

    @abstractmethod
    def reset(self) -> Any:
        """Return the begin of the episode. Called once."""

    @abstractmethod
    def step(self, answer: Any) -> Any:
        """Return what follows ``answer``, the policy's."""

    def close(self) -> Any:
        """Free what the episode holds. Called once, also after a failure."""
        return None


class TokenEnvironment(Environment):
    """Environment that writes prompts in tokens, such as an agent that keeps its own conversation.

    ``reset`` returns a :class:`TokenReply` with the first prompt. ``step`` gets a
    :class:`rl.types.Completion`, and returns the :class:`TokenReply` that follows.
    """


class MessageEnvironment(Environment):
    """Environment in the messages of a conversation.

    ``reset`` returns an :class:`Opening`. ``step`` gets the policy's answer as a message, and
    returns the :class:`Reply` that follows. ``tool_calls`` of the message holds only calls with a
    name and a JSON object of arguments. If an answer has other calls, the policy gets an error, and
    the environment does not see the answer.
    """


class ToolEnvironment(MessageEnvironment):
    """Environment that runs the tool calls of each answer, until an answer has none. ::

    class Sum(ToolEnvironment):
        tools = Tools([add])

        def begin(self):
            return [{"role": "user", "content": "What is 17 + 25?"}]

        def finish(self, message):
            right = message["content"].endswith("42")
            return Reply(reward=float(right), correct=right, done=True)
    """

    tools: Tools

    @abstractmethod
    def begin(self) -> Sequence[Message]:
        """Return the messages before the first answer."""

    @abstractmethod
    def finish(self, message: Message) -> Reply:
        """Return what follows an answer without tool calls, most often the end and its reward."""

    def reset(self) -> Opening:
        """Return the first messages, with all tools."""
        return Opening(self.begin(), self.tools.schemas)

    def step(self, message: Message) -> Reply:
        """Return the answers of the tools, or what ``finish`` returns."""
        answers = self.tools.answer(message)
        return Reply(messages=answers) if answers else self.finish(message)


class EnvironmentTask(Task):
    """Task whose rollouts are episodes of an environment. A subclass, in any package, is a new
    task::

        class Guess(EnvironmentTask):
            def prompt(self, prompt_id):
                return self.seed_prompt(prompt_id, answer=str(prompt_id % 100))

            def environment(self, prompt, sample):
                return GuessingGame(int(prompt.answer))

            def eval_prompts(self, count): ...

    The policy's turns and the environment's messages are in the dialect of ``model.hf_path``. What
    was sampled is never encoded again.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        is_episodic: ClassVar[bool] = True
        """Whether rollouts are episodes of an environment."""

        max_prompt_tokens: Annotated[int, at_least(1, 10**8)] = 1024
        """Maximum length of the messages before the first answer, tools included, in tokens. Longer
        ones cost their group."""

        max_turns: Annotated[int, at_least(1, 10_000)] = 8
        """Maximum number of answers of the policy in an episode."""

        max_episode_tokens: Annotated[int, at_least(2, 10**8)] = 4096
        """Maximum length of an episode, in tokens of all messages and answers. Each answer has at
        most ``rollout.max_tokens``."""

        max_open_episodes: Annotated[int, at_least(0, 10**6)] = 0
        """Maximum number of episodes that are open at once, such as the number of sessions of a
        server; 0 for no limit."""

        step_s: Annotated[float, SECONDS] = 60.0
        """Time for one call of the environment. A call that takes longer costs its group."""

        episode_s: Annotated[float, SECONDS] = 3600.0
        """Time of all calls of the environment after which no more answers are sampled for an
        episode. Its reward counts. An agent, whose reward comes at its end, costs its group."""

        enable_thinking: bool = True
        """Whether the policy may think before an answer, if its chat template has that switch."""

        def longest_sequence(self, max_tokens: int) -> int:
            """Return the maximum length of an episode, in tokens."""
            return self.max_episode_tokens

    config: Config

    def __init__(self, config: Config, *, seed: int, model: ModelConfig):
        super().__init__(config, seed=seed, model=model)
        require(
            model.hf_path is not None,
            f"model.hf_path is not set; {type(self).__name__} needs the chat template of a model",
        )
        assert model.hf_path is not None
        self.dialect = dialect_of(model.hf_path)
        self.set_tokenizer(self.dialect.tokenizer, self.dialect.stop_token_ids)

    def describe(self, folder: Path) -> None:
        super().describe(folder)
        write_stop_tokens(folder, self.stop_token_ids)

    @abstractmethod
    def environment(self, prompt: Prompt, sample: int) -> Environment:
        """Return a new environment for rollout ``sample`` of ``prompt``.

        Runs in an environment worker. All rollouts of a prompt should begin with the same messages.
        """

    def seed_prompt(self, prompt_id: int, *, text: str = "", answer: str = "") -> Prompt:
        """Return a prompt without tokens: its environment writes the first message."""
        return Prompt(prompt_id=prompt_id, tokens=[], text=text, answer=answer)

    def score(self, prompt: Prompt, text: str, completion: Completion) -> NoReturn:
        """Raise TypeError: the environment gives the reward."""
        raise TypeError(
            f"{type(self).__name__} scores no completions; its environment gives rewards"
        )


class SeededTask(EnvironmentTask):
    """Task whose environments draw their problem from a seed. A prompt holds the seed, in
    ``answer``.

    All rollouts of a prompt have the same seed. Seeds of training are even and below 2**31, those
    of evaluation are 1, 3, 5, ….
    """

    def prompt(self, prompt_id: int) -> Prompt:
        digest = blake2b(f"{self.seed}/{prompt_id}".encode(), digest_size=4).digest()
        return self._prompt(prompt_id, int.from_bytes(digest) // 4 * 2)

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [self._prompt(number, 2 * number + 1) for number in range(count)]

    def _prompt(self, prompt_id: int, seed: int) -> Prompt:
        return self.seed_prompt(prompt_id, text=f"seed {seed}", answer=str(seed))
