"""Coroutines against an EngineLoop around a rank's engine; run on the rank."""

import asyncio
from contextlib import contextmanager

from tests.kit.generator_ranks import DEADLINE_S, write


class Borrowed:
    """The rank's engine, kept open after the loop under test."""

    def __init__(self, engine):
        self._real = engine

    def __getattr__(self, name):
        return getattr(self._real, name)

    def close(self):
        self._real.abort(["a", "b", "c", "r", "s", "good"])


def played(engine, scenario, *args, pull=("raise", None), swap="recompute", keep_engine=True):
    """Return the result of ``await scenario(loop, *args)``.

    ``pull`` is ("weights", full weights of any version), ("raise", None), or ("newest", {version:
    full weights}). With "newest", rank r does not see the r newest versions at its first pull.
    """
    from rl.generation.loop import EngineLoop

    how, weights = pull
    hidden = 0 if engine.leads else 1

    def pull_now(engine, version):
        nonlocal hidden
        if how == "raise":
            raise RuntimeError(f"no such version {version}")
        if how == "weights":
            write(engine, weights)
            return version
        version = sorted(weights)[-1 - hidden]
        hidden = 0
        write(engine, weights[version])
        return version

    async def main():
        loop = EngineLoop(lambda: Borrowed(engine) if keep_engine else engine, pull_now)
        await loop.start()
        result = await scenario(loop, *args)
        await loop.close()
        return result

    with swapping(engine, swap):
        return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


@contextmanager
def swapping(engine, swap):
    """Set the engine's in-flight policy to ``swap`` within."""
    usual = engine.inflight_policy
    engine.inflight_policy = swap
    try:
        yield
    finally:
        engine.inflight_policy = usual
