"""Clients of the Tinker SDK that train and sample by turns, each with an adapter of its own.

Usage: python -P tinker_turns.py URL CLIENTS ROUNDS, in the SDK's environment. The clients take
ROUNDS rounds together. A round is the optimizer step of tinker_work.py, a snapshot, and as many
samples of it at once as that file has for a client. Prints the seconds as JSON.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tinker
from tinker import types

sys.path.append(str(Path(__file__).parent))  # at its end, for tinker.py lies beside this file
import tinker_work as work
from tinker_client import training_data

WARM_UP = 2


def main(url: str, clients: int, rounds: int) -> None:
    data = training_data()
    adam = types.AdamParams(learning_rate=work.LEARNING_RATE)
    params = types.SamplingParams(max_tokens=work.NEW_TOKENS, seed=0, stop=[])
    prompt = types.ModelInput.from_ints(work.tokens("prompt", work.PROMPT_TOKENS))
    models = [
        tinker.ServiceClient(base_url=url)
        .create_lora_training_client(work.NAME, rank=work.RANK, seed=seed, train_unembed=False)
        .result()
        for seed in range(clients)
    ]

    def take(model: tinker.TrainingClient, count: int) -> None:
        for _ in range(count):
            model.forward_backward(data, "cross_entropy")
            model.optim_step(adam).result()
            sampler = model.save_weights_and_get_sampling_client().result()
            assert len(sampler.sample(prompt, work.SAMPLES, params).result().sequences)

    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(lambda model: take(model, WARM_UP), models))
        begin = time.perf_counter()
        list(threads.map(lambda model: take(model, rounds // clients), models))
    print(json.dumps({"seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
