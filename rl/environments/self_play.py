"""Environments in which the policy plays against itself."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.dialects.dialect import Dialect
from rl.environments.protocol import Message, TokenEnvironment, TokenReply
from rl.metrics import Entry
from rl.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Continuation of a game after an answer of a player, or its begin."""

    player: int = 0
    """Number of the player who answers next, from 0."""

    message: str = ""
    """Text for this player, before the answer."""

    rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards by player. Only players that have answered can be rewarded."""

    done: bool = False
    """Whether the game ends here."""

    correct: bool = False
    """Whether the episode counts as solved in evaluation."""

    metrics: Mapping[str, Entry] = field(default_factory=dict)
    """Numbers of the episode, as :attr:`rl.environments.protocol.Reply.metrics`."""


class SelfPlay(TokenEnvironment):
    """Game in which the policy is each player, in a conversation of the player's own. ::

        class Higher(SelfPlay):
            def start(self):
                return Move(player=0, message="Write a number.")

            def move(self, player, message):
                ...
                return Move(player=1, message="Write a number.")

        Higher(task.dialect)       # what ``task.environment`` returns

    A player sees the messages for it and its own answers. With ``algorithm.credit`` ``player``, the
    answers of each player are credited with the player's own rewards.
    """

    def __init__(self, dialect: Dialect, *, enable_thinking: bool = True):
        self._dialect = dialect
        self._options: dict[str, Any] = {"enable_thinking": enable_thinking}
        self._player = 0
        self._turns = 0
        self._last: dict[int, int] = {}
        """Number of each player's last answer."""
        self._tokens: dict[int, list[int]] = {}
        """All tokens before the last answer of each player."""
        self._answers: dict[int, list[int]] = {}

    @abstractmethod
    def start(self) -> Move:
        """Return the first move."""

    @abstractmethod
    def move(self, player: int, message: Message) -> Move:
        """Return what follows ``message``, the answer of ``player``."""

    def opening(self, player: int) -> Sequence[Message]:
        """Return messages before the first text for ``player``, such as one of the system."""
        return ()

    def reset(self) -> TokenReply:
        """Return the first prompt."""
        return self._reply(self.start())

    def step(self, answer: Completion) -> TokenReply:
        """Return the prompt of the next player, or the end."""
        player = self._player
        self._answers[player] = [*answer.tokens]
        self._last[player] = self._turns
        self._turns += 1
        turn = self._dialect.parse(self._tokens[player], answer.tokens)
        return self._reply(self.move(player, turn.message))

    def _reply(self, move: Move) -> TokenReply:
        early = [player for player in move.rewards if player not in self._last]
        if early:
            raise ValueError(f"player {early[0]} has a reward and has not answered")
        reward = move.rewards.get(self._player, 0.0)
        others = {
            self._last[other]: more for other, more in move.rewards.items() if other != self._player
        }
        return TokenReply(
            tokens=() if move.done else self._prompt(move),
            player=move.player,
            reward=reward,
            earlier=others,
            done=move.done,
            correct=move.correct,
            metrics=move.metrics,
        )

    def _prompt(self, move: Move) -> list[int]:
        """Return all tokens before the next answer."""
        player = self._player = move.player
        said = [{"role": "user", "content": move.message}]
        if player in self._answers:
            before, answer = self._tokens[player], self._answers[player]
            more = self._dialect.continuation(before, answer, said, **self._options)
            self._tokens[player] = [*before, *answer, *more]
        else:
            messages = [*self.opening(player), *said]
            done = self._dialect.render(messages, add_generation_prompt=True, **self._options)
            self._tokens[player] = done.tokens.tolist()
        return self._tokens[player]
