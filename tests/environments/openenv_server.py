"""A WebSocket server of a guessing game, in the messages of openenv-core, whose own server needs
packages that exclude Tiller's; and a task of it.
"""

import json
import random
from dataclasses import dataclass

from websockets.asyncio.server import serve

from rl.environments.adapters import OpenEnvTask


class Guess(OpenEnvTask):
    @dataclass(kw_only=True, slots=True)
    class Config(OpenEnvTask.Config):
        pass

    def action(self, message):
        return {"guess": message["content"].strip()}

    def show(self, observation):
        return observation["text"]


class Games:
    """Sessions of the server, and the messages that it got."""

    def __init__(self):
        self.seen = []
        self.garbled = False
        self.is_full = False

    async def session(self, socket):
        if self.is_full:
            error = {"message": "Server at capacity: 4/4 sessions", "code": "CAPACITY_REACHED"}
            await socket.send(json.dumps({"type": "error", "data": error}))
            return
        number = 0
        async for text in socket:
            message = json.loads(text)
            self.seen.append(message)
            data = message.get("data", {})
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                number = random.Random(data["seed"]).randint(1, 5)
                await self.answer(socket, f"From 1 to 5, seed {data['seed']}?", None, False)
            elif data["guess"] == "leave":
                return
            elif not data["guess"].isdigit():
                error = {"message": "guess: a number is missing", "code": "VALIDATION_ERROR"}
                await socket.send(json.dumps({"type": "error", "data": error}))
            else:
                right = int(data["guess"]) == number
                await self.answer(socket, "Right." if right else "No.", float(right), right)

    async def answer(self, socket, text, reward, done):
        data = {"observation": {"text": text}, "reward": reward, "done": done}
        await socket.send(
            "{" if self.garbled else json.dumps({"type": "observation", "data": data})
        )


def serving(games: Games):
    """Serve on a free port of this machine."""
    return serve(games.session, "127.0.0.1", 0)


def url_of(server) -> str:
    return f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/ws"
