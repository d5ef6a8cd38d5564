"""Custom losses: a traced graph of operations as data, checked and evaluated node by node.

A graph is evaluated in a process of its own, on the log-probs of a forward pass, not on the ranks
of the trainer: there, an operation that fails on one rank leaves the others in a collective.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rl.tinker.errors import UserError, require

Record = Mapping[str, Any]
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
MAX_NODES = 512
MAX_DEPTH = 8
"""Maximum depth of an argument."""
MAX_ELEMENTS = 1 << 26
"""Maximum number of elements of all results of one evaluation."""
MAX_NUMBER = 1 << 53
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "int64", "bool")}
LEAVES: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "dtype": DTYPES.__getitem__,
    "device": lambda _: torch.device("cpu"),
    "ellipsis": lambda _: ...,
}
"""Arguments by kind, from what stands in their place."""
RESULTS = (torch.Tensor, torch.dtype, torch.device, bool, int, float, type(None))
"""Types of results, beside tuples of them."""
NAMES = {
    "torch": """abs add amax amin any all argsort cat clamp clamp_max clamp_min clip cumsum div dot
        eq erf exp expm1 flip full_like gather ge gt isfinite isinf isnan le log log1p log_softmax
        logaddexp logical_and logical_not logical_or logsumexp lt masked_fill max maximum mean min
        minimum mul nan_to_num ne neg norm numel ones_like pow prod reciprocal relu rsqrt sigmoid
        sign softmax sort sqrt square squeeze stack std sub sum tanh topk unsqueeze var where
        zeros_like""",
    "method": "bool contiguous detach dim double float long reshape size to type_as",
    "torch.nn.functional": """huber_loss log_softmax logsigmoid mse_loss relu sigmoid
        smooth_l1_loss softmax softplus""",
    "operator": """abs add and_ eq floordiv ge getitem gt invert le lt mod mul ne neg or_ pos pow
        sub truediv""",
    "math": "exp log log1p pow sqrt",
    "words": "T device dtype floor indices mean ndim none shape sum trunc values",
    "keywords": """_stacklevel alpha beta correction delta descending dim dtype exponent index
        inplace input k keepdim largest mask max min nan neginf other p posinf reduce reduction
        rounding_mode size_average sorted stable unbiased value weight""",
}
"""Names of functions by module, methods that are not functions of torch, attributes and texts that
an argument may be, and keywords. No name is looked up anywhere else.
"""
LISTS = {place: text.split() for place, text in NAMES.items()}
MODULES = {"torch": torch, "torch.nn.functional": F, "operator": operator, "math": math}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"{at}.{n}": getattr(module, n) for at, module in MODULES.items() for n in LISTS[at]},
    "torch._C._nn.log_sigmoid": F.logsigmoid,
    "torch._C._nn.softplus": F.softplus,
    "getattr": getattr,
}
CALLED = LISTS["torch"] + LISTS["method"]
METHODS = {n: getattr(torch.Tensor, n) for n in CALLED if hasattr(torch.Tensor, n)}
METHODS["view"] = torch.Tensor.reshape  # a view as another dtype would make booleans of any bytes


@dataclass(frozen=True)
class Graph:
    """A custom loss: a function of the log-probs of a datum and of the inputs that it names."""

    nodes: tuple[Record, ...]
    inputs: dict[str, int]
    """Number of dimensions of each input; the first is ``logprobs``."""

    @classmethod
    def of(cls, graph: Record, inputs: Sequence[Record]) -> "Graph":
        """Return a graph that came as JSON. Raises UserError, naming the node, if the graph has
        an operation outside the lists of this module, or is too large.
        """
        before = dict[str, Any]()
        node: Any = "its head"
        try:
            nodes = tuple(graph["nodes"])
            names = [spec["name"] for spec in inputs]
            require(graph["format"] == 1, "the format of the graph must be 1")
            require(len(nodes) <= MAX_NODES, f"the loss has {len(nodes)} nodes of {MAX_NODES}")
            read = [record["target"] for record in nodes if record["op"] == "placeholder"]
            right = read == names and names[:1] == ["logprobs"]
            require(right, f"the graph reads {read}, not logprobs and its inputs {names}")
            ends = [number for number, record in enumerate(nodes, 1) if record["op"] == "output"]
            require(ends == [len(nodes)], "the last node of the loss must be its one output")
            for node in nodes:
                _check(node, before)
                before[node["name"]] = None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"the loss is malformed at {str(node)[:80]}") from error
        return cls(nodes, {spec["name"]: spec["rank"] for spec in inputs})

    def __call__(
        self, logprobs: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss of a datum, a scalar, and its metrics.

        Raises UserError, naming the node, if an operation fails or its result is too large.
        """
        inputs = {**tensors, "logprobs": logprobs}
        for name in self.inputs.keys() & inputs.keys():
            if self.inputs[name] == 0 and inputs[name].numel() == 1:
                inputs[name] = inputs[name].reshape(())
        ranks = {name: tensor.dim() for name, tensor in inputs.items() if name in self.inputs}
        require(ranks == self.inputs, f"the loss needs dimensions {self.inputs}, not {ranks}")
        values = dict[str, Any]()
        left = MAX_ELEMENTS
        for node in self.nodes:
            try:
                value = _evaluated(node, values, inputs, left)
            except Exception as error:
                raise UserError(f"the loss failed at node {node['name']!r}: {error}") from error
            left -= sum(tensor.numel() for tensor in _tensors([value]))
            values[node["name"]] = value
        loss, metrics = value
        scalar = isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad
        require(scalar, "the loss must be a scalar that depends on logprobs")
        return loss, metrics


def _check(node: Record, before: Record) -> None:
    """Raise UserError unless a node is allowed after the nodes of ``before``."""
    op, target = node["op"], node["target"]
    place = f"node {node['name']!r} of the loss"
    known = {"call_function": FUNCTIONS, "call_method": METHODS}.get(op, {target})
    allowed = op in ("placeholder", "output", "call_function", "call_method") and target in known
    require(allowed, f"{place}: {op} {target!r} is not allowed on the server")
    require(node["name"] not in before, f"{place} has the name of a node before")
    others = sorted({*node["kwargs"]} - {*LISTS["keywords"]})
    require(not others, f"{place} has the keywords {others}, which are not allowed")
    args = _decoded([node["args"], [*node["kwargs"].values()]], before)
    if op == "output":
        ((_, metrics),), _ = args
        wrong = [key for key in metrics if not METRIC.fullmatch(key)]
        require(not wrong, f"metrics {wrong} of the loss must be custom/NAME:sum or :mean")


def _decoded(argument: Any, values: Record, depth: int = 0) -> Any:
    """Return an argument of a node; ``values`` are the results of the nodes before."""
    require(depth < MAX_DEPTH, f"an argument of the loss is nested more than {MAX_DEPTH} times")
    if isinstance(argument, list):
        return [_decoded(item, values, depth + 1) for item in argument]
    if not isinstance(argument, dict):
        known = argument in LISTS["words"] or argument is None or _is_number(argument)
        require(known, f"the loss has an argument {str(argument)[:50]!r}, which is not allowed")
        return argument
    ((kind, inner),) = argument.items()
    if kind == "ref":
        return values[inner]
    if kind == "dict":
        return {key: _decoded(item, values, depth + 1) for key, item in inner.items()}
    known = kind in ("tuple", "slice", *LEAVES)
    require(known, f"the loss has an argument of kind {kind!r}, which is not allowed")
    if kind in LEAVES:
        return LEAVES[kind](inner)
    parts = _decoded([*inner], values, depth + 1)
    return slice(*parts) if kind == "slice" else tuple(parts)


def _evaluated(node: Record, values: Record, inputs: Record, left: int) -> Any:
    """Return the result of a node, of at most ``left`` elements."""
    op, target = node["op"], node["target"]
    if op == "placeholder":
        return inputs[target]
    args = _decoded(node["args"], values)
    named = {name: _decoded(arg, values) for name, arg in node["kwargs"].items()}
    if op == "output":
        loss, metrics = args[0]
        return loss, {name: float(torch.as_tensor(value).item()) for name, value in metrics.items()}
    tensors = _tensors([*args, *named.values()])
    sizes = [*map(max, itertools.zip_longest(*(item.shape[::-1] for item in tensors), fillvalue=1))]
    grown = math.prod(sizes) * max(len(sizes), 1)  # ``where`` returns an index for each dimension
    require(max(grown, sum(item.numel() for item in tensors)) <= left, "its result is too large")
    function = METHODS[target] if op == "call_method" else FUNCTIONS[target]
    if function is operator.getitem:
        for index in args[1] if isinstance(args[1], tuple) else [args[1]]:
            repeats = isinstance(index, torch.Tensor) and index.dtype != torch.bool
            is_known = not (repeats or isinstance(index, list | tuple))
            require(is_known, "an index is a tensor or a list")  # which may repeat elements
    elif function is not getattr and (not tensors or target.startswith(("math.", "operator."))):
        known = torch.Tensor if target.startswith("operator.") else ()
        right = all(_is_number(arg) or isinstance(arg, known) for arg in args)
        require(right, f"{target} takes numbers here")
        if not tensors and target.endswith("pow"):
            args = [float(arg) for arg in args]
    if target.endswith(("floordiv", "mod")) or named.get("rounding_mode"):
        operands = [*args, *(named[key] for key in ("input", "other") if key in named)]
        over, by = map(torch.as_tensor, operands[:2])
        if not (over.is_floating_point() or by.is_floating_point()):  # it could end the process
            overflows = (by == -1) & (over == torch.iinfo(torch.int64).min)
            missing = (overflows | (by == 0)).any()
            require(not missing, "an integer is divided by 0, or the least integer by -1")
    result = function(*args, **named)
    parts = result if isinstance(result, tuple) else [result]
    require(all(isinstance(part, RESULTS) for part in parts), "its result has an unknown type")
    return result


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``values`` and in lists among them."""
    lists = (value if isinstance(value, list | tuple) else [value] for value in values)
    return [item for item in itertools.chain(*lists) if isinstance(item, torch.Tensor)]


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= MAX_NUMBER)
