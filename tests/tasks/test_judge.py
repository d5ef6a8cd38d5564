"""A judge is asked within its limits, once for each question, and abstains without an answer."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

import rl
from rl.errors import ConfigError, RunError
from rl.gateway.http import serving
from rl.tasks.judge import Judge, JudgeConfig
from tests.kit.agents import server
from tests.kit.tokenizers import qwen3


class Court:
    """A server that gives ``verdicts`` in turn, texts or codes, and the last one from then on."""

    def __init__(self, *verdicts, takes_s=0.0):
        self.verdicts = verdicts
        self.takes_s = takes_s
        self.times = []
        self.bodies = []
        self.keys = []
        self.now = self.most = 0

    async def answer(self, request):
        self.times.append(time.monotonic())
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        verdict = self.verdicts[min(len(self.times), len(self.verdicts)) - 1]
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.takes_s)
        self.now -= 1
        if isinstance(verdict, int):
            return PlainTextResponse(f"no: {verdict}", verdict, headers={"retry-after": "0"})
        content = verdict if isinstance(verdict, str) else None
        return JSONResponse({"choices": [{"message": {"content": content}}]})

    @asynccontextmanager
    async def judge(self, **options):
        route = Route("/v1/chat/completions", self.answer, methods=["POST"])
        async with serving(None, more=[route]) as url:
            yield Judge(JudgeConfig(url=f"{url}/v1", pause_s=0.001, **options))


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("Score: 0.5", 0.5),
        ("score: 3, no: SCORE:  -1", -1.0),
        ("I cannot tell", None),
        ("", None),
        (None, None),
    ],
)
async def test_the_value_is_the_last_number_of_the_answer(said, value):
    async with Court(said if said is not None else [None]).judge() as judge:
        assert await judge.score("good?") == value


async def test_a_model_that_tiller_serves_judges_and_an_answer_without_a_number_abstains():
    tokenizer = qwen3()
    answers = iter(["Fine. Score: 0.75", "I cannot tell."])

    async def policy(ask):
        return rl.Completion.written([*tokenizer.encode(next(answers)), tokenizer.eos_token_id])

    async with server(policy) as (_, url, _):
        judge = Judge(JudgeConfig(url=f"{url}/v1", max_tokens=50))

        async def judged(prompt, text, completion):
            return await judge.score(f"Rate {text}.")

        rewards = rl.Rewards([judged])
        prompt = rl.Prompt(prompt_id=0, tokens=[1], text="", answer="")
        first = await rewards.score(prompt, "one", rl.Completion.written([1]))
        second = await rewards.score(prompt, "two", rl.Completion.written([1]))
    assert (first.reward, first.metrics) == (0.75, {"judged": 0.75})
    assert (second.reward, second.metrics) == (None, {})


async def test_a_request_has_the_fields_and_the_key_of_the_config(monkeypatch):
    monkeypatch.setenv("COURT", "secret")
    court = Court("Score: 1")
    own = {"model": "m", "max_tokens": 7, "temperature": 0.5}
    async with court.judge(key="COURT", **own) as judge:
        await judge.score("a")
    assert court.bodies == [{"messages": [{"role": "user", "content": "a"}], **own}]
    assert court.keys == ["Bearer secret"]


async def test_equal_questions_are_one_request_and_the_latest_answers_are_kept():
    court = Court("Score: 1", takes_s=0.01)
    async with court.judge(cached=2) as judge:
        assert await asyncio.gather(*(judge.score("a") for _ in range(9))) == [1.0] * 9
        await judge.score("b")
        await judge.score("a")
        assert len(court.times) == 2
        await judge.score("c")
        await judge.score("a")
        assert len(court.times) == 3
        await judge.score("b")  # was forgotten
        assert len(court.times) == 4 and len(judge._answers) == 2


def test_answers_are_kept_over_event_loops():
    court = Court("Score: 1")

    async def first():
        async with court.judge() as judge:
            await judge.score("a")
            return judge

    judge = asyncio.run(first())
    assert asyncio.run(judge.score("a")) == 1.0
    assert len(court.times) == 1


async def test_a_cancelled_question_leaves_the_others_who_ask_it():
    court = Court("Score: 1", takes_s=0.05)
    async with court.judge() as judge:
        one, other = (asyncio.create_task(judge.score("a")) for _ in range(2))
        while not court.times:
            await asyncio.sleep(0.001)
        one.cancel()
        assert await other == 1.0
    assert len(court.times) == 1


async def test_a_failure_of_the_server_is_tried_again_and_then_abstains():
    court = Court(503, 429, "Score: 1")
    async with court.judge() as judge:
        assert await judge.score("a") == 1.0
        assert len(court.times) == 3
    court = Court(500)
    async with court.judge(tries=3) as judge:
        assert await judge.score("a") is None
        assert len(court.times) == 3
        court.verdicts = ("Score: 1",)
        assert await judge.score("a") == 1.0  # a failure is not kept
    assert await judge.score("b") is None  # the server has gone


async def test_a_question_that_the_server_refuses_is_an_error():
    async with Court(401).judge() as judge:
        with pytest.raises(RunError, match=r"v1/chat/completions answered 401: 'no: 401'"):
            await judge.score("a")


async def test_questions_keep_the_limits_of_concurrency_and_rate():
    court = Court("Score: 1", takes_s=0.01)
    async with court.judge(concurrent=3) as judge:
        await asyncio.gather(*(judge.score(f"{number}") for number in range(12)))
    assert court.most == 3
    court = Court("Score: 1")
    async with court.judge(per_minute=1200) as judge:
        begin = time.monotonic()
        await asyncio.gather(*(judge.score(f"{number}") for number in range(5)))
    assert court.times[-1] - begin >= 4 * 60 / 1200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pattern": "("}, r"judge.pattern is '\(': missing \)"),
        ({"pattern": "a"}, "judge.pattern is 'a'; give it a group, the number"),
        ({"key": "NO_SUCH_KEY"}, "judge.key names NO_SUCH_KEY, which is not set"),
    ],
)
def test_a_config_that_cannot_work_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Judge(JudgeConfig(**options))
