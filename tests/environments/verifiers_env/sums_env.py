"""A taskset of verifiers with a harness, as users of verifiers write them. It runs in the server's
Python environment, which has no Tiller.
"""

import json

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def brief(self, task: SumData, trace: vf.Trace) -> float:
        text = trace.nodes[-1].message.content or ""
        return len(text) % 5 / 4

    @vf.reward(weight=2.0)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(str(task.answer) in (trace.nodes[-1].message.content or ""))

    @vf.metric
    async def calls(self, task: SumData, trace: vf.Trace) -> float:
        return float(len(trace.calls))


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for a in range(20):
            text = f"What is {a} + {a + 7}?"
            yield SumTask(SumData(prompt=text, system_prompt="Use the tool.", answer=2 * a + 7))


class LoopConfig(vf.HarnessConfig):
    max_turns: int = 2


class Loop(vf.Harness[LoopConfig]):
    """Agent loop in the server's process. It asks once more, even without a call."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if "13 + 20" in data.prompt:
            raise RuntimeError("no sum for unlucky numbers")
        messages = [
            {"role": "system", "content": data.system_prompt},
            {"role": "user", "content": data.prompt},
        ]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(self.config.max_turns):
                said = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[ADD]
                )
                message = said.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                messages += [_answer(call) for call in message.tool_calls or []]
                if not message.tool_calls:
                    messages.append({"role": "user", "content": "Are you sure?"})
        return ProgramResult(exit_code=0, stdout="", stderr="")


def _answer(call) -> dict:
    try:
        total = str(sum(json.loads(call.function.arguments).values()))
    except (ValueError, TypeError, AttributeError):
        total = "error"
    return {"role": "tool", "tool_call_id": call.id, "content": total}


__all__ = ["Loop", "Sums"]
