"""The side of the Tinker SDK: takes the steps and draws the samples of tinker_work.py.

Usage: python -P tinker_client.py URL STEPS, in the SDK's environment. Prints seconds of each step,
samples per second, and the seconds of each client's samples, as JSON.
"""

import json
import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tinker
from tinker import types

sys.path.append(str(Path(__file__).parent))  # at its end, for tinker.py lies beside this file
import tinker_work as work


def draw(sampler: tinker.SamplingClient, client: int) -> float:
    """Return the seconds in which a client drew its samples, one after another."""
    begin = time.perf_counter()
    for number in range(work.SAMPLES):
        prompt = types.ModelInput.from_ints(
            work.tokens(f"prompt/{client}/{number}", work.PROMPT_TOKENS)
        )
        params = types.SamplingParams(max_tokens=work.NEW_TOKENS, seed=number, stop=[])
        (sequence,) = sampler.sample(prompt, 1, params).result().sequences
        assert len(sequence.tokens) == work.NEW_TOKENS
    return time.perf_counter() - begin


def draw_all(handle: str, process: int, ready: Any, waits: Any) -> None:
    """Have every PROCESSES-th client draw at once, when all processes are ready."""
    sampler = tinker.SamplingClient.from_sampler_handle(handle)
    own = range(process, work.CLIENTS, work.PROCESSES)
    draw(sampler, process)
    ready.wait()
    with ThreadPoolExecutor(len(own)) as clients:
        waits.put([*clients.map(lambda client: draw(sampler, client), own)])


def training_data() -> list[types.Datum]:
    """Return the data of a step."""
    rows = [work.tokens(f"datum/{number}", work.TOKENS) for number in range(work.DATUMS)]
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def main(url: str, steps: int) -> None:
    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client(
        work.NAME, rank=work.RANK, seed=0, train_unembed=False
    ).result()
    data = training_data()
    adam = types.AdamParams(learning_rate=work.LEARNING_RATE)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        calls = [training.forward_backward(data, "cross_entropy"), training.optim_step(adam)]
        loss, _ = [call.result() for call in calls]
        seconds.append(time.perf_counter() - begin)
    sampler = training.save_weights_and_get_sampling_client().result()
    context = multiprocessing.get_context("spawn")
    ready, queue = context.Barrier(work.PROCESSES + 1), context.Queue()
    handle = sampler.get_sampler_handle()
    for process in range(work.PROCESSES):
        arguments = (handle, process, ready, queue)
        context.Process(target=draw_all, args=arguments, daemon=True).start()
    ready.wait()
    begin = time.perf_counter()
    waits = [wait for _ in range(work.PROCESSES) for wait in queue.get()]
    rate = work.CLIENTS * work.SAMPLES / (time.perf_counter() - begin)
    found = {"seconds": seconds, "samples_per_s": rate, "waits": waits}
    print(json.dumps({**found, "loss": loss.metrics["loss:sum"]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
