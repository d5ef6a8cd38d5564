"""Generators join and leave while requests and training go on."""

import asyncio
import itertools
from collections.abc import Callable

import httpx
import pytest

import rl
from rl.errors import ConfigError
from rl.gateway.http import serving
from rl.generation.generator_config import GeneratorConfig
from rl.session.generators_page import generators_page
from rl.types import GenerationRequest, Sampling
from tests.session.sessions import batch, trainer_config

CLIENTS = 6
TOKENS = 60


async def test_generators_join_and_leave_without_a_lost_request(sessions):
    generator = GeneratorConfig(kv_cache_gib=0.05)
    session = await sessions.start(trainer=trainer_config(), generator=generator)
    await session.connect()
    ends = asyncio.Event()
    names = itertools.count()

    async def sample_on() -> int:
        count = 0
        while not ends.is_set():
            request = GenerationRequest(
                request_id=f"flow/{(name := next(names))}",
                prompt_tokens=[1, 2, 3],
                seed=name,
                sampling=Sampling(max_tokens=TOKENS),
            )
            (completion,) = await session.sample([request])
            assert (len(completion.tokens), completion.finish_reason) == (TOKENS, "length")
            count += 1
        return count

    async def until(condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    def both_work() -> bool:
        return all(mesh.load for mesh in session.pool.meshes)

    more = [generators_page(session.pool, "k")]
    async with (
        session.running(),
        serving(None, key="k", more=more) as url,
        httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer k"}) as client,
    ):

        async def ask(replicas: object) -> httpx.Response:
            return await client.put("/generators", json={"replicas": replicas})

        flow = [asyncio.create_task(sample_on()) for _ in range(CLIENTS)]
        asked = (await ask(2)).json()
        assert (asked["replicas"], [*asked["generators"]]) == (2, ["generator-0"])
        await session.pool.scaled()
        await session.forward_backward(batch(), rl.losses.grpo())
        await session.optim_step(lr=1e-2)
        await session.push()
        found = (await client.get("/generators")).json()["generators"]
        assert {name: each["policy_version"] for name, each in found.items()} == {
            "generator-0": 1,
            "generator-1": 1,
        }
        assert {each["state"] for each in found.values()} == {"serving"}
        await until(both_work)
        second = session.pool.meshes[1]
        open_calls = []
        generate = second.generate

        async def noted(*args: object, **options: object) -> object:
            open_calls.append(args)
            completions = await generate(*args, **options)
            open_calls.remove(args)
            return completions

        second.generate = noted
        await until(lambda: open_calls)
        await session.scale(1)
        assert not open_calls and not second.is_running  # none had to be asked again
        assert session.generator_versions == {"generator-0": 1}
        await session.scale(2)  # a number that left comes back
        await until(both_work)
        ends.set()
        assert min(await asyncio.gather(*flow)) > 0
        for replicas, status, code in (
            (0, 400, "invalid_value"),
            ("2", 400, "invalid_value"),
            (1001, 400, "invalid_value"),
        ):
            refused = await ask(replicas)
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert (await httpx.AsyncClient(base_url=url).get("/generators")).status_code == 401
        with pytest.raises(ConfigError, match="^replicas is 1001; it must be 1 to 1000$"):
            await session.scale(1001)
        with pytest.raises(ConfigError, match="^replicas is 0; it must be 1 to 1000$"):
            await session.scale(0)
