"""Estimate of the time of a step from the figures of the hardware: a model of three stages,
accurate to about a factor of two.

The model counts matrix products, attention, collectives of large tensors and bytes that are read.
The optimizer, idle ranks, environments and rewards enter only through the efficiencies. Replace the
efficiencies by measurements (``timing/*`` of a run). Use the estimate to compare configs.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from rl.config import PreferenceConfig, RLConfig
from rl.errors import counted
from rl.generation.generator_config import kv_bytes_per_token, weight_bytes
from rl.model.decoder import parameter_shapes
from rl.model.delta_net import heads_of
from rl.model.shape import ModelShape, shape_of
from rl.plan.collectives import HIDDEN, Collective, collectives_of
from rl.plan.memory import kv_sequences
from rl.plan.peak_memory import feed_forward_width, micro_batch_cells
from rl.plan.planned_run import LEARNING, PlannedRun
from rl.plan.push_cost import Push

TRAFFIC = 30
"""Number of times that a training step on CPU reads or writes a result of a layer, as measured with
a model of 135 million parameters. A forward pass has a third of it."""
ROWS = 32
"""Number of rows that a product of few rows costs more than its own on CPU, as measured."""
SAMPLED = 11e-9
"""Seconds in which vLLM samples from one logit on CPU, as measured."""
DECODED = 4e-3
"""Seconds of vLLM's own work in a decoding step on CPU, as measured."""
STEPPED = 32
"""Bytes that an optimizer step reads or writes for each trained parameter."""
MEAN_SHARE = 0.5
"""Assumed ratio of mean to maximum length of prompts, completions and examples."""

COLLECTIVES = (
    "collectives at the full rate of the links; FSDP's run beside the computation, which waits for "
    "the others"
)
"""Assumption about the trainer's collectives."""


@dataclass(frozen=True, slots=True)
class Step:
    """Times of a step and its stages, in seconds, and counts. Training on given examples is a
    single stage: the figures of the other stages are 0.
    """

    generation: float
    training: float
    push: float
    seconds: float
    waiting: float
    """Part of ``training`` in which the trainer waits for collectives."""
    collectives: tuple[Collective, ...]
    """Collectives of the policy's gradients, in a micro-batch on a rank."""
    trainer_idle: float
    """Share of the step in which the trainer is idle."""
    generators_idle: float
    """Share of the step in which the generators are idle."""
    concurrency: int
    """Number of sequences that a generator decodes at once."""
    tokens: int
    """Number of tokens of all prompts and completions of a step."""
    tflop: float
    """Floating-point operations of the policy's forward and backward passes, in TFLOP."""
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class Time:
    """Time of passes over a batch, in seconds."""

    seconds: float = 0.0
    waiting: float = 0.0
    """Part in which the ranks wait for collectives."""


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of a batch that the ranks of a role compute."""

    tokens: float
    """Number of tokens that the layers compute. A prompt that sequences share counts once."""
    heads: float
    """Number of tokens whose logits are computed."""
    length: float
    """Mean length of a sequence."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parameter counts of a model."""

    total: int
    active: int
    """Number of parameters that one token uses."""
    experts: int
    """Number of parameters of all experts together."""


@cache
def sizes_of(shape: ModelShape, *, fuse_qkv: bool) -> Sizes:
    """Return the sizes of a model. A token uses ``experts_per_token`` experts and one row of the
    embedding.
    """
    shapes = parameter_shapes(shape, fuse_qkv=fuse_qkv)
    total = sum(map(math.prod, shapes.values()))
    experts = sum(math.prod(size) for name, size in shapes.items() if ".inner_experts." in name)
    used = experts * shape.experts_per_token // shape.num_experts if experts else 0
    looked_up = 0 if shape.tie_embeddings else shape.vocab_size * shape.dim
    return Sizes(total, total - experts + used - looked_up, experts)


def step_of(run: PlannedRun, push: Push | None) -> Step:
    """Return the estimate of a step. ``push`` is None for runs without generators."""
    if push is None or not isinstance(run.config, RLConfig):
        length = run.config.longest * MEAN_SHARE
        tokens = round(run.config.sequences * length)
        load = Load(tokens, tokens, length)
        time = _training(run, load)
        stages = (0.0, time.seconds, 0.0)
        seconds = time.seconds
        concurrency = 0
        assumptions: tuple[str, ...] = (
            f"mean sequence {length:g} tokens, half of task.max_tokens",
            *_rates(run),
            COLLECTIVES,
            "no time for optimizer, data, validation or checkpoints",
        )
    else:
        prompt, completion = _mean_lengths(run)
        length = prompt + completion
        tokens = round(run.config.sequences * length)
        load = _rollouts(run, prompt, completion)
        time = _training(run, load)
        generation, concurrency = _generation(run, prompt, completion)
        stages = (generation, time.seconds, push.seconds)
        lockstep = run.rl.rollout.max_staleness == 0
        seconds = sum(stages) if lockstep else max(stages)
        assumptions = _assumptions(run, prompt, completion, lockstep=lockstep)
    return Step(
        *stages,
        seconds=seconds,
        waiting=time.waiting,
        collectives=tuple(collectives_of(run, "trainer", train=True)),
        trainer_idle=1 - time.seconds / seconds,
        generators_idle=1 - stages[0] / seconds if concurrency else 0.0,
        concurrency=concurrency,
        tokens=tokens,
        tflop=_flop(run, "trainer", load, train=True) / 1e12,
        assumptions=assumptions,
    )


def _mean_turns(run: PlannedRun) -> float:
    """Return the mean number of answers of a rollout."""
    task = run.episodes
    return max(1.0, task.max_turns * MEAN_SHARE) if task else 1.0


def _mean_lengths(run: PlannedRun) -> tuple[float, float]:
    """Return the mean numbers of given and of sampled tokens of a rollout."""
    prompt = run.rl.task.max_prompt_tokens * MEAN_SHARE
    sampled = run.rl.rollout.max_tokens * MEAN_SHARE * _mean_turns(run)
    if run.episodes is None:
        return prompt, sampled
    whole = run.rl.longest * MEAN_SHARE
    sampled = min(sampled, whole / 2 if prompt > whole / 2 else whole - prompt)
    return whole - sampled, sampled


def _rollouts(run: PlannedRun, prompt: float, completion: float) -> Load:
    """Return the load of rollouts with these mean lengths. Context parallelism computes the logits
    of all tokens.
    """
    trainer = run.config.trainer
    sequences = run.config.sequences
    sharing = min(trainer.prompt_sharing, run.rl.rollout.samples_per_prompt)
    tokens = sequences * (prompt / sharing + completion)
    whole = trainer.parallelism.context_parallel_degree > 1
    heads = tokens if whole else sequences * completion
    return Load(tokens, heads, prompt + completion)


def _flop(run: PlannedRun, name: str, load: Load, *, train: bool) -> float:
    """Return the operations of one pass over a batch, by all ranks of a role together."""
    role = run.roles[name]
    shape = shape_of(role.model)
    head = shape.vocab_size * shape.dim
    layers = sizes_of(shape, fuse_qkv=role.model.fuse_qkv).active - head
    # causal: a token attends to half of the tokens on average
    attention = 2 * shape.n_attentions * shape.n_heads * shape.head_dim * load.length
    rule = 0
    if linear := len(shape.layers_with_delta_rule):
        rule = linear * shape.delta_value_heads * heads_of(shape).flop
    forward = load.tokens * (2 * layers + attention + rule)
    if role.head != "values":
        forward += load.heads * 2 * head
    if not train:
        return forward
    policy = role.trainer.activation_checkpoint
    again = {FullAC.Config: 1.0, SelectiveAC.Config: 0.5}.get(type(policy), 0.0)
    # frozen weights need no gradient of their own
    backward = 2 if role.trainer.lora is None else 1
    return forward * (1 + backward + again)


def _training(run: PlannedRun, load: Load) -> Time:
    """Return the time of the forward passes for the batch's columns, which compute the logits of
    all tokens, and of the gradients. Meshes on separate devices run in parallel.
    """
    asked, passes = _passes(run)
    scored = replace(load, heads=load.tokens)
    forward = [_pass(run, name, scored, train=False) for name in asked]
    load = replace(load, tokens=passes * load.tokens, heads=passes * load.heads)
    learning = [_pass(run, name, load, train=True) for name in run.roles if name in LEARNING]
    rounds = [*forward, *learning]
    if not run.shared:
        rounds = [max(forward, default=Time()), max(learning)]
    return Time(sum(time.seconds for time in rounds), sum(time.waiting for time in rounds))


def _pass(run: PlannedRun, name: str, load: Load, *, train: bool) -> Time:
    """Return the time of a role's passes over a batch. Collectives that run beside the computation
    take time only if they take longer.
    """
    trainer = run.roles[name].trainer
    rate = run.rate(trainer.training.mixed_precision_param) * trainer.ranks
    computing = _flop(run, name, load, train=train) / rate
    if not run.cuda:
        shape = shape_of(run.roles[name].model)
        heads = (shape.n_heads + shape.n_kv_heads) * shape.head_dim
        layer = 6 * shape.dim + 4 * heads + 4 * feed_forward_width(shape)
        results = load.tokens * shape.n_layers * layer  # elements
        results += load.heads * 2 * shape.vocab_size
        moved = TRAFFIC / (1 if train else 3) * 4 * results
        if train and trainer.lora is None:
            updates = run.config.updates_per_step
            size = sizes_of(run.shape, fuse_qkv=run.config.model.fuse_qkv).total
            moved += STEPPED * updates * size
        computing += moved / (run.device.memory_gb_s * 1e9 * trainer.ranks)
        computing /= run.threads
    full = load.tokens / trainer.dp_degree / micro_batch_cells(run, trainer)
    beside = between = 0.0
    for collective in collectives_of(run, name, train=train):
        if collective.axis in HIDDEN:
            beside += collective.seconds * (1 if collective.once else math.ceil(full))
        else:
            between += collective.seconds * full
    seconds = max(computing, beside) + between
    return Time(seconds, seconds - computing)


def _passes(run: PlannedRun) -> tuple[list[str], float]:
    """Return the roles that must compute columns of the batch before its gradients, and the mean
    number of gradient passes over a sequence.
    """
    config = run.config
    if isinstance(config, RLConfig):
        columns = config.algorithm.columns()
        asked = [name for name in run.roles if name != "trainer" or name in columns]
        return asked, config.algorithm.passes
    if not isinstance(config, PreferenceConfig):
        return [], 1.0
    cached = config.reference.scores == "cached"
    unasked = ["trainer"] if config.in_one_pass else []
    unasked += ["reference"] if cached else []
    asked = [name for name in run.roles if name not in unasked]
    return asked, 0.5 if config.loss.build().is_unpaired else 1.0


def _generation(run: PlannedRun, prompt: float, completion: float) -> tuple[float, int]:
    """Return the seconds of generation and the number of sequences that a generator decodes at
    once.

    The time of prompts is that of their matrix products. With a prefix cache, a prompt is computed
    once for each group. A decoding step is limited by matrix products or by reading the weights,
    keys and values. In lockstep, the longest completion decides the number of steps.
    """
    generator = run.rl.generator
    hardware = run.hardware
    device = run.device
    sizes = sizes_of(run.shape, fuse_qkv=run.config.model.fuse_qkv)
    tp = generator.tensor_parallel_degree
    requests = math.ceil(run.config.sequences / generator.replicas)
    fits = kv_sequences(run, math.ceil(prompt + completion))
    concurrency = max(1, min(requests, generator.max_running_requests, fits))
    threads = run.generator_threads
    products = 2 * sizes.active / (tp * threads * run.rate(generator.dtype))
    sharing = run.rl.rollout.samples_per_prompt if generator.prefix_caching else 1
    prompts: float = math.ceil(requests / sharing)
    if run.episodes and run.rl.rollout.pipeline == "deterministic":
        prompts *= (_mean_turns(run) + 1) / 2  # each turn computes its whole prefix again
    weights = weight_bytes(generator, run.wanted[0])
    if sizes.experts:
        shape = run.shape
        reached = 1 - (1 - shape.experts_per_token / shape.num_experts) ** concurrency
        weights -= round(sizes.experts / tp * run.transfer_bytes * (1 - reached))
    steps = max(requests * completion / concurrency, completion)
    if run.rl.rollout.max_staleness == 0:
        steps = max(steps, run.rl.rollout.max_tokens * _mean_turns(run))
    rows = requests * completion / steps  # on average
    cache = rows * (prompt + completion / 2) * kv_bytes_per_token(generator, run.shape)
    computing = rows * products
    if run.cuda:
        rate = device.memory_gb_s * 1e9 * hardware.generation_efficiency
        step = max((weights + cache) / rate, computing)
    else:
        reading = (weights + cache) / (device.memory_gb_s * 1e9 * threads)
        step = DECODED + (rows + ROWS) * products + reading
        step += SAMPLED * rows * run.shape.vocab_size
    return prompts * prompt * products + steps * step, concurrency


def _rates(run: PlannedRun) -> list[str]:
    """Return what is assumed of the rates of the hardware."""
    hardware = run.hardware
    device = run.device
    if not run.cuda:
        float32 = device.float32_tflops or device.tflops
        sampling = f", a rank of the generators {run.generator_threads}" if run.generators else ""
        return [
            f"a thread does {float32:.2g} TFLOP/s in float32 and {device.tflops:.2g} in bfloat16, "
            f"and moves {device.memory_gb_s:.3g} GB/s",
            f"a rank of the models has {counted(run.threads, 'thread')}{sampling}",
        ]
    training = f"{hardware.training_efficiency:.0%} (hardware.training_efficiency)"
    if not run.generators:
        return [f"a device does {device.tflops:g} TFLOP/s at {training}"]
    return [
        f"a device does {device.tflops:g} TFLOP/s at {training}, generators too",
        f"decoding reads {device.memory_gb_s:g} GB/s at {hardware.generation_efficiency:.0%} "
        "(hardware.generation_efficiency)",
    ]


def _assumptions(
    run: PlannedRun, prompt: float, completion: float, *, lockstep: bool
) -> tuple[str, ...]:
    parallel = "stages side by side: the longest is the step"
    lengths = (
        f"mean prompt {prompt:g} tokens, half of task.max_prompt_tokens; mean completion "
        f"{completion:g}, half of rollout.max_tokens"
    )
    if run.episodes:
        lengths = (
            f"mean episode {prompt + completion:g} tokens, half of task.max_episode_tokens, of "
            f"which {completion:g} are sampled in {_mean_turns(run):g} turns, half of "
            "task.max_turns; no time for environments"
        )
    rollout = run.rl.rollout
    replaced = []
    if groups := rollout.max_resampled_groups:
        times = 1 + groups / rollout.prompts_per_step
        replaced = [f"no replaced groups; all {groups} make generation {times:.3g} times as long"]
    return (
        lengths,
        *replaced,
        *_rates(run),
        "lockstep: stages one after another" if lockstep else parallel,
        COLLECTIVES,
        "no time for optimizer, rewards, or moves between host and device",
    )
