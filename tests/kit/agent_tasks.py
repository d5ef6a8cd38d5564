"""Tasks of agents that know nothing of Tiller. Workers import them like a user's task."""

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from openai import AsyncOpenAI, BadRequestError, OpenAI, OpenAIError

from rl.environments.agent import AgentTask
from rl.environments.protocol import Reply
from tests.kit.agents import act
from tests.kit.numbered_prompts import NumberedPrompts

PROGRAM = Path(__file__).with_name("agent_program.py")
TURNS = 4
RAISES, SILENT, HANGS, EXITS, NO_REPLY, ENDLESS, ENDLESS_RAISES, FAILS = range(100, 108)
KINDS = ("none", "compacts", "renames")
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}


class Agents(NumberedPrompts, AgentTask):
    """Agents with habits by prompt_id; prompts 100 and above misbehave."""

    async def agent(self, prompt, api):
        mood = prompt.prompt_id
        async with AsyncOpenAI(base_url=api.base_url, api_key=api.key) as client:
            if mood == SILENT:
                return Reply(reward=1.0)
            if mood == HANGS:
                await act(client, "none", 1)
                await asyncio.sleep(3600)
            if mood == EXITS:
                sys.exit("no agent, no worker")
            if mood == FAILS:
                await api.run([sys.executable, "-c", "import sys; sys.exit('no such tool')"])
            try:
                turns = 1000 if mood in (ENDLESS, ENDLESS_RAISES) else TURNS
                await act(client, KINDS[mood % 3], turns, temperature=0.3, max_tokens=100)
            except OpenAIError:
                if mood != ENDLESS:
                    raise
                return Reply(reward=0.5)
            if mood == RAISES:
                raise ZeroDivisionError("no reward today")
            return None if mood == NO_REPLY else Reply(reward=1.0, correct=True, metrics={"own": 2})


class Blocking(Agents):
    """Agent whose client blocks."""

    def agent(self, prompt, api):
        with OpenAI(base_url=api.base_url, api_key=api.key) as client:
            messages = [{"role": "user", "content": "1 + 2?"}]
            for _ in range(3):
                said = client.chat.completions.create(model="gpt-4o", messages=messages)
                messages.append(said.choices[0].message.model_dump(exclude_none=True))
                messages.append({"role": "user", "content": "Go on."})
        return Reply(reward=1.0)


class Sure(Agents):
    """Agent whose reward is the log-prob of its answer. It first asks for those of a prompt."""

    @dataclass(kw_only=True, slots=True)
    class Config(AgentTask.Config):
        top: int = 0

    config: Config

    async def agent(self, prompt, api):
        messages = [{"role": "user", "content": "1 + 2?"}]
        async with AsyncOpenAI(base_url=api.base_url, api_key=api.key) as client:
            try:
                await client.completions.create(model="gpt-4o", prompt="1", echo=True, logprobs=1)
            except BadRequestError as error:
                refused = float("log-probs of its prompts" in str(error))
            said = await client.chat.completions.create(
                model="gpt-4o",
                messages=messages,
                logprobs=True,
                top_logprobs=self.config.top,
                stop="never",
            )
        rows = said.choices[0].logprobs.content
        likely = float(sum(len(row.top_logprobs) for row in rows))
        metrics = {"likely": likely, "refused": refused}
        return Reply(reward=sum(row.logprob for row in rows), metrics=metrics)


class Formed(Agents):
    """Agent that asks for answers of a form, and for long ones."""

    async def agent(self, prompt, api):
        messages = [{"role": "user", "content": "1 + 2?"}]
        async with AsyncOpenAI(base_url=api.base_url, api_key=api.key) as client:
            for more in ({"response_format": {"type": "json_object"}}, {"min_tokens": 90}, {}):
                await client.chat.completions.create(
                    model="gpt-4o", messages=messages, max_tokens=100, extra_body=more
                )
        return Reply(reward=1.0)


class Program(Agents):
    """Agent that is a program of its own."""

    async def agent(self, prompt, api):
        said = await api.run([sys.executable, str(PROGRAM)], stdin="1 + 2?", env={"TURNS": "2"})
        return Reply(reward=float(len(json.loads(said))), correct="PATH" in os.environ)


class Guesser(Agents):
    """Agent of OpenAI's SDK that lets the policy guess by a tool, and forgets all at half time."""

    @dataclass(kw_only=True, slots=True)
    class Config(AgentTask.Config):
        pass

    def prompt(self, prompt_id):
        return self.seed_prompt(
            prompt_id, text=f"Guess {prompt_id % 7}.", answer=str(prompt_id % 7)
        )

    def eval_prompts(self, count):
        return [self.prompt(prompt_id) for prompt_id in range(count)]

    async def agent(self, prompt, api):
        digits = 0
        opening = [{"role": "user", "content": prompt.text}]
        messages = [*opening]
        async with AsyncOpenAI(base_url=api.base_url, api_key=api.key) as client:
            for turn in range(4):
                said = await client.chat.completions.create(
                    model="gpt-4o", messages=messages, tools=[TOOL], temperature=0.2
                )
                message = said.choices[0].message
                text = message.content or ""
                digits += sum(each.isdigit() for each in text) + 5 * len(message.tool_calls or [])
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or []:
                    told = {"role": "tool", "tool_call_id": call.id, "content": "higher"}
                    messages.append(told)
                if not message.tool_calls:
                    messages.append({"role": "user", "content": "Go on."})
                if turn == 1:
                    messages = [*opening, {"role": "user", "content": "Begin again."}]
        return Reply(reward=float(digits), correct=digits > 3)


class Overflows(Agents):
    """Agent whose second request has no room, and what follows by ``then``."""

    @dataclass(kw_only=True, slots=True)
    class Config(AgentTask.Config):
        then: str = ""

    config: Config

    async def agent(self, prompt, api):
        if self.config.then.startswith("program"):
            env = {"TURNS": "1000", "LOSES_TOOL": str(int(self.config.then == "program, tool"))}
            return await api.run([sys.executable, str(PROGRAM)], stdin="1 + 2?", env=env)
        lost = ConnectionError("the tool server refused the connection")
        messages = [{"role": "user", "content": "word " * 400}]
        async with AsyncOpenAI(base_url=api.base_url, api_key=api.key) as client:
            await act(client, "none", 1)
            try:
                await client.chat.completions.create(model="any", messages=messages)
            except OpenAIError as error:
                if self.config.then == "raises":
                    raise
                if self.config.then == "wraps":
                    raise RuntimeError("the agent gives up") from error
                if self.config.then == "group":
                    raise ExceptionGroup("two", [error, lost]) from None
                if self.config.then == "tool while handling":
                    raise lost  # noqa: B904
            if self.config.then != "tool":
                await act(client, "none", 1)
            if self.config.then == "goes on":
                return Reply(reward=0.25)
            raise lost


class Clock:
    """Clock of this process that can be set forward."""

    ahead = 0.0

    @classmethod
    def monotonic(cls):
        return time.monotonic() + cls.ahead


class Slow(Agents):
    """Agent that sets the clock forward by ``agent_s`` before each of its requests."""

    @dataclass(kw_only=True, slots=True)
    class Config(AgentTask.Config):
        agent_s: float = 0.0

    config: Config

    async def agent(self, prompt, api):
        async with AsyncOpenAI(base_url=api.base_url, api_key=api.key) as client:
            for _ in range(3):
                Clock.ahead += self.config.agent_s
                await act(client, "none", 1)
        return Reply(reward=0.75)


class Prints(Agents):
    """Agent whose command prints 20 MB to each output, and leaves a process that holds both.

    The metrics are the size and the number of pipes of what the run kept.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AgentTask.Config):
        folder: str = ""
        exit_code: int = 0

    config: Config

    async def agent(self, prompt, api):
        async with AsyncOpenAI(base_url=api.base_url, api_key=api.key) as client:
            await act(client, "none", 1)
        done = Path(self.config.folder) / "done"
        script = f"""
            stat -L -c %F /proc/$$/fd/1 /proc/$$/fd/2
            head -c 20000000 /dev/zero | tee /dev/stderr
            setsid sh -c 'until test -e {done}; do sleep 0.1; done' &
            echo the end >&2
            exit {self.config.exit_code}
        """
        try:
            said = await api.run(["bash", "-c", script])
        finally:
            done.touch()
        return Reply(metrics={"kept": float(len(said)), "pipes": float(said.count("fifo"))})
