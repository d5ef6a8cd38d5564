"""The side of the Tinker SDK: takes the steps and draws the samples of tinker_work.py.

Usage: python -P tinker_client.py URL STEPS, in the SDK's environment. Prints seconds of each step,
samples per second, and the seconds of each client's samples, one after another and all at once, as
JSON.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tinker
from tinker import types

sys.path.append(str(Path(__file__).parent))  # at its end, for tinker.py lies beside this file
import tinker_work as work

Draw = Callable[[tinker.SamplingClient, int], float]


def ask(sampler: tinker.SamplingClient, client: int, number: int) -> Any:
    """Return the future of a sample."""
    given = work.tokens(f"prompt/{client}/{number}", work.PROMPT_TOKENS)
    params = types.SamplingParams(max_tokens=work.NEW_TOKENS, seed=number, stop=[])
    return sampler.sample(types.ModelInput.from_ints(given), 1, params)


def receive(sample: Any) -> None:
    (sequence,) = sample.result().sequences
    assert len(sequence.tokens) == work.NEW_TOKENS


def draw(sampler: tinker.SamplingClient, client: int) -> float:
    """Return the seconds in which a client drew its samples, one after another."""
    begin = time.perf_counter()
    for number in range(work.SAMPLES):
        receive(ask(sampler, client, number))
    return time.perf_counter() - begin


def flood(sampler: tinker.SamplingClient, client: int) -> float:
    """Return the seconds in which a client drew FLOOD samples at once."""
    begin = time.perf_counter()
    for sample in [ask(sampler, client, number) for number in range(work.FLOOD)]:
        receive(sample)
    return time.perf_counter() - begin


def draw_all(handle: str, own: range, draws: Draw, ready: Any, waits: Any) -> None:
    """Have the clients ``own`` draw at once, when all processes are ready."""
    sampler = tinker.SamplingClient.from_sampler_handle(handle)
    draw(sampler, own[0])
    ready.wait()
    with ThreadPoolExecutor(len(own)) as clients:
        waits.put([*clients.map(lambda client: draws(sampler, client), own)])


def in_processes(handle: str, draws: Draw, processes: int) -> tuple[list[float], float]:
    """Return the seconds of each client in so many processes, and of all together."""
    context = multiprocessing.get_context("spawn")
    ready, queue = context.Barrier(processes + 1), context.Queue()
    for process in range(processes):
        own = range(process, work.CLIENTS, processes)
        arguments = (handle, own, draws, ready, queue)
        context.Process(target=draw_all, args=arguments, daemon=True).start()
    ready.wait()
    begin = time.perf_counter()
    waits = [wait for _ in range(processes) for wait in queue.get()]
    return waits, time.perf_counter() - begin


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
    handle = sampler.get_sampler_handle()
    waits, all_of_it = in_processes(handle, draw, work.PROCESSES)
    rate = work.CLIENTS * work.SAMPLES / all_of_it
    flooded, _ = in_processes(handle, flood, work.FLOOD_PROCESSES)
    found = {"seconds": seconds, "samples_per_s": rate, "waits": waits, "flood_waits": flooded}
    print(json.dumps({**found, "loss": loss.metrics["loss:sum"]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
