"""All checks, in order."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rl.cli.arguments import read_config
from rl.cli.help import take_name
from rl.config import RLConfig, RunConfig
from rl.doctor.config import check_cluster, check_config, check_settings
from rl.doctor.data import check_inputs, check_prompts, check_template, check_trainer
from rl.doctor.findings import Finding, error, refused
from rl.doctor.host import Host
from rl.doctor.resources import check_output, check_room
from rl.doctor.reward import check_reward
from rl.doctor.run import check_run
from rl.errors import ConfigError
from rl.model.hub import Snapshot, title_of
from rl.plan.plan import Plan
from rl.validation import checks
from rl.validation.folders import check_numbers, models_of


def check_given(host: Host, arguments: list[str], program: str) -> Iterator[Finding]:
    """Yield what is wrong with the config or the run that the command line names."""
    run = None if arguments[0].startswith("-") else Path(arguments[0])
    config = None
    if run is None and take_name(arguments)[0] is None:
        fix = "give --config NAME, or the folder of a run as the first argument"
        yield error("config", "command line", "--config NAME is missing", fix)
        return
    if run is not None:
        arguments = ["--config", str(run / "config.json"), *arguments[1:]]
    try:
        name, config = read_config(arguments, program=program)
    except ConfigError as reason:
        yield refused("config", reason)
    else:
        if run is not None:
            config = replace(config, output_dir=str(run), resume=True)
        yield from check_all(host, name, config)
    if run is not None:
        yield from check_run(run, config)


def check_all(host: Host, name: str, config: RunConfig) -> Iterator[Finding]:
    """Yield what is wrong with a config, its input, and the host for it."""
    made = checks(config)
    if found := [*check_config(config, made[:3])]:
        yield from found
        return  # all else relies on these three
    found = [*check_config(config, made[3:])]
    yield from found
    if not found:
        yield from _check_valid(host, name, config)
    if isinstance(config, RLConfig):
        task, wrong = check_inputs(config)
        yield from wrong
        if task is not None:
            yield from check_template(task.tokenizer, task.stop_token_ids)
            prompts = [*check_prompts(config, task)]
            yield from prompts
            if not any(finding.severity == "error" for finding in prompts):
                yield from check_reward(config, task)
    elif not found:
        yield from check_trainer(config)


def _check_valid(host: Host, name: str, config: RunConfig) -> Iterator[Finding]:
    """Yield what stands in the way of a config that nothing refuses, and its models on the Hub."""
    for section, model in models_of(config).items():
        if isinstance(model.hf_path, Snapshot):
            yield Finding("config", "note", f"{section}.hf_path", title_of(model.hf_path), "")
    yield from check_settings(config)
    yield from check_cluster(config, len(os.environ.get("TILLER_NODES", "").split()) or 1)
    yield from check_output(name, config)
    try:
        check_numbers(config)
        plan = Plan(config)
    except ConfigError as reason:
        yield refused("config", reason)
        return
    for lack in plan.lacks:
        yield refused("config", lack)
    yield from check_room(host, config, plan)
