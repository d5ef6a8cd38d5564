"""Plays a coroutine against an EngineLoop around a rank's engine; runs on the rank."""

import asyncio

from tests.generation.ranks import DEADLINE_S, write


class Borrowed:
    """The rank's engine, which outlives the loop under test."""

    def __init__(self, engine):
        self._real = engine

    def __getattr__(self, name):
        return getattr(self._real, name)

    def close(self):
        self._real.abort(["a", "b", "c", "r", "s", "good"])


def played(engine, scenario, *args, pull=("raise", None), keep_engine=True):
    """What ``await scenario(loop, *args)`` returns. ``pull`` is ("weights", full weights) or ("raise", None)."""
    from rl.generation.loop import EngineLoop

    how, weights = pull

    def pull_now(engine, version):
        if how == "raise":
            raise RuntimeError(f"no such version {version}")
        write(engine, weights)

    async def main():
        loop = EngineLoop(lambda: Borrowed(engine) if keep_engine else engine, pull_now)
        await loop.start()
        result = await scenario(loop, *args)
        await loop.close()
        return result

    return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
