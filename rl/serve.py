"""The program: a server with the API of OpenAI, over a config's model or a run's policy.

Exit codes: 1 failed, 2 the arguments cannot work, 128 + n ended by signal n.
"""

import argparse
import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl.cli.help import CONFIGS, quick_help
from rl.cli.program import as_program
from rl.errors import end_program, require
from rl.host.listening import require_key

if TYPE_CHECKING:
    from rl.config import RunConfig
    from rl.dialects.dialect import Dialect
    from rl.gateway.gateway import Gateway
    from rl.session.session import Session
    from rl.session.session_config import SessionConfig
    from rl.types import Sampling

PROGRAM = "python -m rl.serve"
KEY = "TILLER_API_KEY"
USAGE = f"""\
usage: {{program}} --config NAME [--host HOST] [--port N] [--FIELD VALUE ...]
       {{program}} --run RUN [--step N] [--host HOST] [--port N] [--FIELD VALUE ...]

Serve a model with the API of OpenAI: chat completions with tools, completions, tokens in and
tokens out. With --config the model has the weights that a run would start from; with --run, those
of a checkpoint. A session keeps a conversation token for token: docs/gateway.md. Ctrl-C ends it.

  --run RUN          folder of a run
  --step N           checkpoint of the run; by default the newest that is complete
  --host HOST        address to listen on; by default 127.0.0.1, which only this machine reaches.
                     For others, set {KEY} to the key that clients have to give
  --port N           port to listen on; by default 8000; 0: any free one
  --model-name NAME  name of the model; by default policy

  {{program}} --config quickstart --port 8000
  {{program}} --run runs/first

{CONFIGS}"""


@as_program
def main(arguments: list[str]) -> None:
    """Serve until a signal."""
    if text := quick_help(arguments, PROGRAM, USAGE):
        print(text)
        return
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model-name", default="policy")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--step", type=int)
    own, rest = parser.parse_known_args(arguments)
    require(0 <= own.port < 2**16, f"--port {own.port}: it must be 0 to 65535")
    require(own.run is not None or own.step is None, "--step needs --run RUN")
    key = os.environ.get(KEY) or None

    require_key(own.host, key)

    # these import torch, which --help does without
    from rl.actors import fork_server

    fork_server.start()
    from rl.cli.saved_run import open_run, run_session
    from rl.gateway.http import serving

    if own.run is not None:
        run = open_run(own.run, own.step, rest, program=PROGRAM)
        config = run.config
        session_config = run.session_config(evaluates=True)
    else:
        config, session_config = _fresh(rest)
    require(
        session_config.generator is not None and session_config.head == "logprobs",
        f"this {type(config).__name__} samples nothing; choose a config with generators",
    )
    dialect, sampling = _dialect_of(config)

    async def serve(session: "Session") -> None:
        gateway = make_gateway(session, dialect, sampling, model=own.model_name)
        async with serving(gateway, host=own.host, port=own.port, key=key) as url:
            print(f"serving {own.model_name} on {url}/v1", flush=True)
            await asyncio.Event().wait()

    run_session(session_config, None, serve)


def make_gateway(
    session: "Session", dialect: "Dialect", sampling: "Sampling", *, model: str
) -> "Gateway":
    """Return a gateway whose answers ``session`` samples. ``sampling`` holds default parameters."""
    from rl.gateway.answers import until
    from rl.gateway.gateway import Ask, Gateway
    from rl.model.shape import shape_of
    from rl.types import Completion, GenerationRequest

    names = iter(range(2**62))
    decode = dialect.tokenizer.decode

    async def sample(ask: Ask) -> Completion:
        sampling = ask.sampling
        stops: tuple[str, ...] = ()
        if session.config.model.hf_path is None:  # generators have no tokenizer to find texts with
            sampling, stops = replace(sampling, stop=()), sampling.stop
        request = GenerationRequest(
            request_id=f"serve/{next(names)}",
            prompt_tokens=ask.tokens,
            seed=ask.seed,
            sampling=sampling,
        )
        try:
            (completion,) = await session.sample([request], affinity=ask.session or None)
        except asyncio.CancelledError:  # its client has gone
            await session.abort(request.request_id)
            raise
        return until(lambda tokens: any(stop in decode(tokens) for stop in stops), completion)

    return Gateway(
        sample,
        dialect,
        sampling=sampling,
        longest=shape_of(session.config.model).max_seq_len,
        vocab_size=len(dialect.tokenizer),
        model=model,
    )


def _fresh(arguments: list[str]) -> "tuple[RunConfig, SessionConfig]":
    """Return a config, and a session with the weights that its run would start from."""
    from rl.cli.arguments import parse_config
    from rl.cli.saved_run import require_one_host

    _, config = parse_config(arguments, program=PROGRAM)
    session = replace(config.session(), trainer=None, roles={})
    nodes = 0 if session.generator is None else session.generator.nodes
    require_one_host(config, generator_nodes=nodes)
    return config, session


def _dialect_of(config: "RunConfig") -> "tuple[Dialect, Sampling]":
    """Return the dialect of the model, and the defaults of sampling."""
    from rl.config import RLConfig
    from rl.dialects.choose import dialect_or_text
    from rl.types import Sampling

    longest = config.model.max_seq_len
    if not isinstance(config, RLConfig):
        assert config.model.hf_path is not None, "conversations have a tokenizer"
        return dialect_or_text(config.model.hf_path), Sampling(max_tokens=longest)
    task = config.task.build_scorer(seed=config.seed, model=config.model)
    sampling = replace(config.rollout.sampling(task.stop_token_ids), max_tokens=longest)
    return dialect_or_text(config.model.hf_path or task.tokenizer), sampling


if __name__ == "__main__":
    end_program(main())
