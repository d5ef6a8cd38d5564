"""The program: a server with the API of OpenAI, over a config's model or a run's policy, or with
the API of Tinker, which trains the config's model for its clients.

Exit codes: 1 failed, 2 the arguments cannot work, 128 + n ended by signal n.
"""

import argparse
import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl.cli.help import CONFIGS, show_help
from rl.cli.program import as_program
from rl.errors import end_program, require
from rl.host.listening import KEY, require_key

if TYPE_CHECKING:
    from rl.config import RunConfig, ServeConfig
    from rl.dialects.dialect import Dialect
    from rl.gateway.gateway import Gateway
    from rl.session.session import Session
    from rl.types import Sampling

PROGRAM = "python -m rl.serve"
USAGE = f"""\
usage: {{program}} --config NAME [--host HOST] [--port N] [--FIELD VALUE ...]
       {{program}} --run RUN [--step N] [--host HOST] [--port N] [--FIELD VALUE ...]

Serve a model with the API of OpenAI: chat completions with tools, completions, tokens in and
tokens out. With --config the model has the weights that a run would start from; with --run, those
of a checkpoint. A session keeps a conversation token for token: docs/gateway.md. Ctrl-C ends it.

The config of a server, such as serve_tiny, is served with the API of Tinker too, whose clients
train it: docs/tinker.md. What they do is kept in --output-dir; --resume goes on with it.

  --run RUN          folder of a run
  --step N           checkpoint of the run; by default the newest that is complete
  --host HOST        address to listen on; by default 127.0.0.1, which only this machine reaches.
                     For others, set {KEY} to the key that clients have to give
  --port N           port to listen on; by default 8000; 0: any free one
  --model-name NAME  name of the model; by default policy

  {{program}} --config quickstart --port 8000
  {{program}} --config serve_tiny --output-dir tinker
  {{program}} --run runs/first

{CONFIGS}"""


@as_program
def main(arguments: list[str]) -> None:
    """Serve until a signal."""
    show_help(arguments, PROGRAM, USAGE)
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model-name", default="policy")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--step", type=int)
    options, rest = parser.parse_known_args(arguments)
    require(0 <= options.port < 2**16, f"--port {options.port}: it must be 0 to 65535")
    require(options.run is not None or options.step is None, "--step needs --run RUN")
    key = os.environ.get(KEY) or None

    require_key(options.host, key)

    # these import torch, which --help does without
    from rl.actors import fork_server

    fork_server.start()
    from rl.cli.arguments import parse_config
    from rl.cli.saved_run import SavedRun, open_run, run_session
    from rl.config import ServeConfig
    from rl.gateway.http import serving
    from rl.observe.prometheus import Numbers
    from rl.session.generators_page import generators_page
    from rl.session.metrics_page import metrics_page

    if options.run is not None:
        run = open_run(options.run, options.step, rest, program=PROGRAM)
        config = run.config
        session_config = run.session_config(evaluates=True)
    else:
        name, config = parse_config(rest, program=PROGRAM, serves=True)
        if isinstance(config, ServeConfig):
            _serve_clients(name, config, host=options.host, port=options.port, key=key)
            return
        session_config = SavedRun(config).session_config(evaluates=True)
    fix = "choose a config with generators"
    if options.run is not None:
        fix = (
            f"export the model with python -m rl.export {options.run} DIR, and serve DIR: "
            f"{PROGRAM} --config gsm8k_jsonl --model.hf_path DIR --task.path FILE"
        )
    samples = session_config.generator is not None and session_config.head == "logprobs"
    require(samples, f"this {type(config).__name__} samples nothing", fix=fix)
    dialect, sampling = _dialect_of(config)

    async def serve(session: "Session") -> None:
        gateway = make_gateway(session, dialect, sampling, model=options.model_name)
        page = metrics_page(Numbers(options.model_name), lambda: session, key)
        more = [page, generators_page(session.pool, key)]
        async with serving(
            gateway, host=options.host, port=options.port, key=key, more=more
        ) as url:
            print(f"serving {options.model_name} on {api_of(url, dialect)}", flush=True)
            await asyncio.Event().wait()

    run_session(session_config, None, serve)


def _serve_clients(
    name: str, config: "ServeConfig", *, host: str, port: int, key: str | None
) -> None:
    """Serve config ``name`` to clients of Tinker and of OpenAI, from its run folder."""
    from rl.cli.saved_run import require_one_host, run_session
    from rl.config.frozen import frozen
    from rl.dialects.choose import dialect_or_text
    from rl.gateway.http import serving
    from rl.host.disk import write_whole
    from rl.model.tokenizer import read_stop_token_ids
    from rl.observe.events import Events, print_texts
    from rl.observe.owner import claim
    from rl.observe.prometheus import Numbers
    from rl.session.concurrency import background
    from rl.session.generators_page import generators_page
    from rl.session.metrics_page import metrics_page
    from rl.tinker.app import routes_of
    from rl.tinker.server import Server
    from rl.types import Sampling

    nodes = config.generator.nodes
    require_one_host(config, trainer_nodes=config.trainer.nodes, generator_nodes=nodes)
    owner = claim(name, config.output_dir, resume=config.resume)
    content = json.dumps({"name": name, "config": frozen(config)}, indent=2).encode()
    dialect = dialect_or_text(config.model.hf_path) if config.model.hf_path else None
    stops = read_stop_token_ids(dialect.tokenizer) if dialect else ()

    async def serve(session: "Session") -> None:
        numbers = Numbers(config.offered()[0])
        events = Events(print_texts, numbers.write)
        for change in changes:
            events.note(f"resuming with another {change}")
        options = {"decode": dialect.tokenizer.decode} if dialect else {}
        server = Server(config, session, owner.folder, events, stop_token_ids=stops, **options)
        sampling = Sampling(max_tokens=server.parts.longest)
        gateway = None
        if dialect:
            gateway = make_gateway(
                session, dialect, sampling, model=server.names[0], weights="base"
            )
        async with background(server.run()):
            await server.samplers.running.wait()
            write_whole(owner.folder / "config.json", lambda file: file.write(content))
            pages = metrics_page(numbers, lambda: session, key), generators_page(session.pool, key)
            more = [*pages, *routes_of(server, key)]
            async with serving(gateway, host=host, port=port, key=key, more=more) as url:
                names = ", ".join(server.names)
                openai = f", to OpenAI's on {api_of(url, dialect)}" if dialect else ""
                print(f"serving {names}: to Tinker's SDK on {url}{openai}", flush=True)
                await asyncio.Event().wait()

    with owner:
        changes = changes_of(config, owner.folder) if config.resume else []
        run_session(config.session(), None, serve, folder=owner.folder, opens=False)


def changes_of(config: "ServeConfig", folder: Path) -> list[str]:
    """Return ``field: old → new`` for the fields that differ from those of the server before, whose
    folder is ``folder``.

    Raises ConfigError, naming all differences, if clients would go on with another model: a field
    differs that changes what is computed.
    """
    from rl.config.frozen import UNCHANGED, read_config_file, thawed
    from rl.plan.report import changes
    from rl.types.rules import NUMERICS

    path = folder / "config.json"
    before = thawed(read_config_file(path, f"--resume: {path}")["config"])
    folders = [str(settings.model.hf_path or "") for settings in (before, config)]
    if all(map(os.path.isdir, folders)) and os.path.samefile(*folders):
        before.model.hf_path = config.model.hf_path
    changed = changes(before, config)
    refused = [field.change for field in changed if field.mark == NUMERICS]
    rule = "give the values from before, or serve the new config from another --output-dir"
    problem = f"{folder} has what clients made with another config: {'; '.join(refused)}"
    require(not refused, problem, field="--resume", fix=rule)
    return [field.change for field in changed if field.change.split(":")[0] not in UNCHANGED]


def make_gateway(
    session: "Session",
    dialect: "Dialect",
    sampling: "Sampling",
    *,
    model: str,
    weights: str | None = None,
) -> "Gateway":
    """Return a gateway whose answers ``session`` samples from ``weights``. ``sampling`` holds
    default parameters.
    """
    from rl.errors import ActorFailure
    from rl.gateway.answers import until
    from rl.gateway.gateway import Ask, Gateway
    from rl.gateway.protocol import ApiError
    from rl.model.shape import shape_of
    from rl.types import Completion, GenerationRequest

    names = iter(range(2**62))
    decode = dialect.tokenizer.decode

    async def sample(ask: Ask) -> Completion:
        sampling = ask.sampling
        stops: tuple[str, ...] = ()
        if session.config.model.hf_path is None:  # generators have no tokenizer to find texts with
            if sampling.json_schema:
                message = "response_format needs a model with model.hf_path; leave it out"
                param = "response_format"
                raise ApiError(400, message, code="unsupported_parameter", param=param)
            sampling, stops = replace(sampling, stop=()), sampling.stop
        request = GenerationRequest(
            request_id=f"serve/{next(names)}",
            prompt_tokens=ask.tokens,
            seed=ask.seed,
            sampling=sampling,
        )
        try:
            affinity = ask.session or None
            (completion,) = await session.sample(
                [request],
                affinity=affinity,
                weights=weights,
                on_tokens=None if stops else ask.on_tokens,  # tokens after a stop will be dropped
            )
        except asyncio.CancelledError:  # its client has gone
            await session.abort(request.request_id)
            raise
        except ActorFailure as failure:
            refusal = failure.__cause__
            if not isinstance(refusal, ValueError):
                raise
            message = str(refusal).removeprefix(f"request {request.request_id!r}: ")
            raise ApiError(400, message, code="invalid_value") from None
        return until(lambda tokens: any(stop in decode(tokens) for stop in stops), completion)

    return Gateway(
        sample,
        dialect,
        sampling=sampling,
        longest=shape_of(session.config.model).max_seq_len,
        vocab_size=len(dialect.tokenizer),
        model=model,
    )


def api_of(url: str, dialect: "Dialect") -> str:
    """Return the URL of the API of OpenAI, and what of the API is missing."""
    from rl.dialects.plain_text import TextDialect

    missing = " (no chats: there is no chat template)" if isinstance(dialect, TextDialect) else ""
    return f"{url}/v1{missing}"


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
