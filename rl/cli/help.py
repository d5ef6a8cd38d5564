"""Help texts of the programs; they are printed without importing torch, which takes seconds."""

import ast
import hashlib
import json
import textwrap
from argparse import ArgumentParser
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from rl.cli.program import reader_of_a_run
from rl.errors import ConfigError, nearest

SHIPPED = Path(__file__).parents[2] / "configs"
"""Folder of the configs that ship with Tiller: next to its package."""
COMMON_FIELDS = Path(__file__).with_name("common_fields.json")
"""Ranges and defaults of the common fields; ``scripts/make_configuration_md.py`` writes them."""

GROUPS = {
    "run": {
        "steps": "number of steps",
        "epochs": "over the data; 0: by steps",
        "examples_per_step": "",
        "validate_every": "steps; 0: at the end only",
        "seed": "of weights and samples",
        "output_dir": "'': runs/NAME-TIME",
        "resume": "go on in output_dir",
        "quiet": "print errors only",
    },
    "model and data": {
        "model.hf_path": "Hugging Face folder or name",
        "model.max_seq_len": "prompt + completion, tokens",
        "task.*": "",
    },
    "rollouts": {
        "rollout.prompts_per_step": "",
        "rollout.samples_per_prompt": "",
        "rollout.max_tokens": "of a completion",
        "rollout.temperature": "",
        "rollout.max_staleness": "in steps; 0: lockstep",
        "rollout.pipeline": "",
        "rollout.reward_workers": "processes that score",
    },
    "algorithm": {
        "algorithm.update_epochs": "passes over a batch",
        "algorithm.loss.clip_low": "",
        "algorithm.loss.clip_high": "",
        "algorithm.loss.entropy_coef": "",
        "loss.beta": "strength of the reference",
    },
    "trainer": {
        "trainer.optimizer.param_groups.0.optimizer_kwargs.lr": "learning rate",
        "trainer.lr_scheduler.warmup_steps": "",
        "trainer.micro_batch_size": "sequences",
        "trainer.nodes": "",
        "trainer.parallelism.data_parallel_shard_degree": "",
        "trainer.parallelism.tensor_parallel_degree": "",
        "trainer.parallelism.expert_parallel_degree": "",
        "trainer.training.mixed_precision_param": "dtype of computation",
        "trainer.checkpoint.interval": "steps between checkpoints",
    },
    "generator": {
        "generator.replicas": "engines",
        "generator.nodes": "0: on the trainer's nodes",
        "generator.tensor_parallel_degree": "",
    },
    "evaluation": {
        "evaluation.every": "0: at the end only",
        "evaluation.prompts": "held out; 0: no evaluation",
        "evaluation.samples": "k of pass@k; 0: greedy only",
    },
    "hardware": {
        "hardware.device": "",
        "hardware.gpus_per_node": "",
        "colocate": "meshes that share devices",
    },
}
"""Fields that a config's help shows, by group, each with a few words. ``*`` stands for one name."""

RARE = {
    *("task.max_open_episodes", "task.revision", "task.dataset_config", "task.held_out_split"),
}
"""Fields of GROUPS that a config's help leaves out."""

CONFIGS = """\
NAME is one of these configs, MODULE.FUNCTION of a module of your own, or the config.json of a run:

{configs}

--config NAME --help lists the common fields of that config, with range and default. Any of its
fields can be given; --config NAME --help-all and docs/configuration.md list them all."""

COMMON = """\
  --steps N              number of steps
  --seed N               seed of the initial weights, the prompts and the completions
  --output-dir DIR       run folder; by default runs/NAME-TIME
  --resume               go on from the newest complete checkpoint in --output-dir
  --quiet                print errors only
  --model.hf_path DIR    Hugging Face folder, or name on its Hub, to start from
  --task.path FILE       file, folder or Hub dataset of prompts, for configs that read one"""

USAGE = (
    """\
usage: {program} --config NAME [--FIELD VALUE ...]

"""
    + CONFIGS
)

READS_A_RUN = """\
The run folder is only read, so the run may still be going on.

Any field of the config can be given after these arguments, with the names
that python -m rl.train takes. Add these for a run of several nodes or GPUs:
  --trainer.nodes 1
  --trainer.parallelism.data_parallel_replicate_degree 1
  --trainer.parallelism.data_parallel_shard_degree 1
  --trainer.parallelism.context_parallel_degree 1
  --trainer.parallelism.tensor_parallel_degree 1
  --trainer.parallelism.expert_parallel_degree 1
  --trainer.compile.no-enable
{one_gpu}

exit codes: 0 done, 1 failed, 2 the arguments cannot work, 130 Ctrl-C"""

PAGE = """\
usage: {program} --config {name} [--FIELD VALUE ...]

{description}

{which}, each with its default, its range and what it is. A flag that is on is turned off by
no-, as in --no-quiet. A choice between kinds of a part is given without dashes, for example
trainer.activation-checkpoint:full, trainer.float8:linear or trainer.lora:on.

{fields}

{more}"""


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for a help text."""
    return not {"-h", "--help", "--help-all"}.isdisjoint(arguments)


def show_help(arguments: Sequence[str], program: str, usage: str = USAGE) -> None:
    """Print the help text that the arguments ask for and exit, unless the text requires an import
    of the config.
    """
    name, rest = take_name(arguments)
    if not asks_for_help(arguments):
        return
    sources = shipped_sources()
    if name is None:
        width = max(map(len, sources)) + 4
        options: dict[str, Any] = {"width": 100, "subsequent_indent": " " * width}
        configs = (
            textwrap.fill(text, initial_indent=f"  {config_name:<{width - 2}}", **options)
            for config_name, (_, text) in sources.items()
        )
        print(usage.format(program=program, common=COMMON, configs="\n".join(configs)))
        raise SystemExit(0)
    if name not in sources or "--help-all" in rest:
        return
    known = json.loads(COMMON_FIELDS.read_text())
    source = sources[name][0]
    if known["sources"].get(source.name) == digest(source):
        rows = zip(known["configs"][name], known["ranges"].items(), strict=True)
        fields = {field: (value, limits) for value, (field, limits) in rows if value is not None}
        print(config_help(program, name, fields))
        raise SystemExit(0)


def all_help(program: str, name: str, fields: Mapping[str, tuple[str, str, str]]) -> str:
    """Return the help text of every field of a config, given default, range and text of each field
    by name.
    """
    rows = []
    for field, (default, limits, text) in fields.items():
        rows.append(f"  {f'--{field} {default}':<70} {limits}".rstrip())
        rows.append(textwrap.fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6))
    more = "docs/configuration.md says more of each, and lists the kinds of parts."
    return _page(program, name, "All fields", filter(None, rows), more)


def config_help(program: str, name: str, fields: Mapping[str, tuple[str, ...]]) -> str:
    """Return the help text of a config, given default and range of its common fields by name."""
    rows = []
    for group, patterns in GROUPS.items():
        listed = [
            (field, text)
            for pattern, text in patterns.items()
            for field in fields
            if _matches(field, pattern)
        ]
        rows += [group] if listed else []
        for field, text in listed:
            default, limits = fields[field][:2]
            option = f"--{field} {default}"
            rows.append(f"  {option:<50} {limits:<18}  {text}".rstrip())
    more = "--help-all lists every field; so does docs/configuration.md."
    return _page(program, name, "Common fields", rows, more)


def _page(program: str, name: str, which: str, rows: Iterable[str], more: str) -> str:
    _, text = shipped_sources().get(name, (SHIPPED, f"Config {name}."))
    description = textwrap.fill(text, 100)
    fields = "\n".join(rows)
    return PAGE.format(
        program=program, name=name, description=description, which=which, fields=fields, more=more
    )


def is_common(field: str) -> bool:
    """Whether a config's help shows the field."""
    return any(_matches(field, pattern) for words in GROUPS.values() for pattern in words)


def _matches(field: str, pattern: str) -> bool:
    is_named = fnmatchcase(field, pattern) and field.count(".") == pattern.count(".")
    return is_named and field not in RARE


@cache
def shipped_sources() -> dict[str, tuple[Path, str]]:
    """Return source file and first paragraph of the docstring of each shipped config, by name."""
    sources = {}
    for path in sorted(SHIPPED.glob("[!_]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.returns:
                kind = ast.unparse(node.returns).strip("'\"")
                if kind.endswith("Config"):
                    text = (ast.get_docstring(node) or "").partition("\n\n")[0]
                    sources[node.name] = path, " ".join(text.split())
    return sources


def digest(path: Path) -> str:
    """Return a digest of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def take_name(arguments: Sequence[str], option: str = "--config") -> tuple[str | None, list[str]]:
    """Return the value of ``option``, None if it is missing, and the other arguments."""
    rest = list(arguments)
    for index, argument in enumerate(rest):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2], rest[:index] + rest[index + 1 :]
        if argument == option and index + 1 < len(rest):
            return rest[index + 1], rest[:index] + rest[index + 2 :]
    return None, rest


def check_arguments(arguments: Sequence[str], program: str) -> None:
    """Raise ConfigError if the config of the arguments is missing or is not a shipped config.

    The user's own configs are not searched. Does not import torch.
    """
    check_name(take_name(arguments)[0], program)


def check_name(name: str | None, program: str) -> None:
    """Raise ConfigError if the name is None, or neither a shipped config nor a path or module."""
    shipped = shipped_sources()
    if name is None:
        names = textwrap.fill(", ".join(shipped), 100, initial_indent="configs: ")
        raise ConfigError(
            f"--config NAME is missing; for example {program} --config quickstart\n{names}"
        )
    if "." not in name:
        check_known(name, name, shipped)


def check_known(name: str, function: str, known: Collection[str]) -> None:
    """Raise ConfigError if ``function`` is not known. The message lists the nearest functions and
    all known functions.
    """
    if not known:
        raise ConfigError(
            f"--config {name}: the module has no configs; a config is a function such as "
            f"def {function}() -> RLConfig"
        )
    if function not in known:
        fix = f"{nearest(function, known)}the configs are {', '.join(sorted(known))}"
        raise ConfigError("there is no such config", field=f"--config {name}", fix=fix)


def run_parser(program: str, description: str, one_gpu: str, **options: Any) -> ArgumentParser:
    """Return the parser of a program that loads a checkpoint: ``--step`` beside the arguments of
    :func:`rl.cli.program.reader_of_a_run`, whose ``options`` it takes.

    ``one_gpu`` lists, beside fields of the trainer, the overrides that a run of many GPUs needs to
    fit on fewer GPUs.
    """
    parser = reader_of_a_run(program, description, READS_A_RUN.format(one_gpu=one_gpu), **options)
    parser.add_argument(
        "--step",
        metavar="N",
        type=lambda text: text if text == "best" else int(text),
        help="load RUN/checkpoints/step-N, or the best by best.metric; without this option, the "
        "newest that is complete",
    )
    return parser
