"""Errors that only a GPU shows, put into Tiller's code."""

import importlib
import inspect
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """Replacement in the source of a function; called, it changes the function in this process."""

    function: str
    """Module and qualified name, with a colon between them."""
    old: str
    new: str
    error: str
    """Part of the error of the rehearsal; empty if the error is a wait of the host."""

    def __call__(self) -> None:
        name, _, path = self.function.partition(":")
        module = importlib.import_module(name)
        *owners, last = path.split(".")
        owner = module
        for each in owners:
            owner = getattr(owner, each)
        source = textwrap.dedent(inspect.getsource(getattr(owner, last)))
        assert self.old in source, f"{self.function} has no {self.old!r} any more"
        made: dict = {}
        file = inspect.getsourcefile(module)
        code = compile(source.replace(self.old, self.new, 1), file, "exec")
        exec(code, vars(module), made)
        setattr(owner, last, made[last])


@dataclass(frozen=True)
class Together:
    """Several mutations of one rehearsal."""

    mutations: tuple[Mutation, ...]

    def __call__(self) -> None:
        for mutation in self.mutations:
            mutation()


ENGINE = "rl.training.engine:TrainingEngine"
HEAD = "rl.training.logprobs:"
METRICS = "rl.training.token_metrics:totals_of"
MICRO = "rl.training.micro_batches:MicroBatch"
ONE_DTYPE = "a product takes one dtype"

MUTATIONS = {
    "a micro-batch stays on the host": Mutation(
        f"{ENGINE}._micro_batches", ".to(self.device)", "", "device"
    ),
    "one column stays on the host": Mutation(
        f"{MICRO}.to", 'name != "index"', 'name not in ("index", "loss_weights")', "device"
    ),
    "a host tensor in a stack": Mutation(
        METRICS, "torch.zeros_like(weight)", "torch.zeros((), dtype=torch.float64)", "device"
    ),
    "a host tensor in a collective": Mutation(
        f"{ENGINE}._micro_batches",
        "group = self._batch_group",
        "dist.all_reduce(torch.ones(1), group=(group := self._batch_group))",
        "NCCL refuses tensors of",
    ),
    "a product of two dtypes": Mutation(
        f"{HEAD}_scaled_logits", "(hidden[chunk],", "(hidden[chunk].float(),", ONE_DTYPE
    ),
    "a missing cast": Mutation(
        f"{HEAD}_LinearLogProbs.backward", ".to(hidden.dtype)", "", ONE_DTYPE
    ),
    "a missing dimension": Mutation(
        f"{HEAD}linear_logprobs",
        ".reshape(len(flat), *targets.shape[hidden.dim() - 1 :] or (1,))",
        "",
        "dimension",
    ),
    "a missing transposition": Mutation(
        f"{HEAD}_scaled_logits",
        "product(hidden[chunk], weight)",
        "hidden[chunk] @ weight",
        "reduction dim",
    ),
    "a number read from the device": Mutation(
        f"{HEAD}LogProbHead.forward", "group = None", "group = None; float(hidden.sum())", ""
    ),
    "a condition on a device tensor": Mutation(
        METRICS, "weights > 0", "weights > 0 if weights.sum() > 0 else weights > 1", ""
    ),
    "a mask that is an index": Mutation(
        f"{MICRO}.per_token",
        "[self.cells].masked_fill(first, 0.0)",
        "[self.cells][first | ~first]",
        "",
    ),
}

WAITS = [mutation for mutation in MUTATIONS.values() if not mutation.error]
ONE_OF_EACH_KIND = (
    "a host tensor in a stack",
    "a host tensor in a collective",
    "a missing cast",
    "a missing dimension",
)
"""Errors that end a rehearsal. Others are for the long tests."""
