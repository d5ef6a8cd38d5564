"""A traced loss gives the numbers of the function; what could harm the server is refused."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from rl.tinker.errors import UserError
from rl.tinker.graph import LISTS, MAX_NODES, METHODS, Graph
from tests.tinker.graphs import encoded


def importance(logprobs, sampled, advantages):
    ratio = torch.exp(logprobs - sampled)
    clipped = torch.clamp(ratio, min=0.8, max=1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.detach().mean(), "custom/loss:sum": loss}


def masked(logprobs, sampled, advantages):
    kept = advantages > 0
    own = logprobs[kept] - sampled.masked_fill(~kept, float("-inf"))[kept]
    own = torch.where(own.isfinite(), own, torch.zeros_like(own))
    return (own.square() / math.sqrt(2.0)).sum(), {}


def ranked(logprobs, sampled, advantages):
    values, order = torch.sort(sampled, descending=True)
    best = torch.topk(advantages, 2).values
    picked = torch.gather(logprobs, 0, order)
    stacked = torch.stack([picked * values, picked + best[0]])
    wide = stacked.to(torch.float64).view(-1)[1:].float()
    return -F.logsigmoid(wide).mean() * logprobs.shape[0] + logprobs[..., None].var(), {}


def smooth(logprobs, sampled, advantages):
    count = logprobs.numel()
    loss = F.huber_loss(logprobs, sampled, reduction="sum", delta=0.5) / count**2
    near = torch.logical_and(advantages < 1, advantages.abs() < 1).float()
    return loss + (near * logprobs.softmax(dim=0)).cumsum(0).max() ** 2, {
        "custom/near:sum": near.sum()
    }


def functional(name: str):
    def loss(logprobs, sampled, advantages):
        given = (logprobs, sampled) if name.endswith("_loss") else (logprobs,)
        found = getattr(F, name)(*given, **({"dim": 0} if "softmax" in name else {}))
        return (found * advantages).sum(), {}

    return loss


LOSSES = {each.__name__: each for each in (importance, masked, ranked, smooth)}
LOSSES |= {name: functional(name) for name in LISTS["torch.nn.functional"]}


@pytest.mark.parametrize("name", LOSSES)
def test_a_graph_has_the_values_and_gradients_of_its_function(name):
    loss = LOSSES[name]
    torch.manual_seed(0)
    given = {"sampled": torch.randn(6), "advantages": torch.randn(6)}
    leaf = torch.randn(6, requires_grad=True)
    found = Graph.of(**encoded(loss))(leaf, given)
    wanted = loss(leaf, **given)
    torch.testing.assert_close(found[0], wanted[0])
    assert found[1] == {name: pytest.approx(float(each)) for name, each in wanted[1].items()}
    torch.testing.assert_close(*(torch.autograd.grad(each[0], leaf) for each in (found, wanted)))


def test_a_method_view_makes_no_booleans_of_other_bytes():
    def loss(logprobs):
        return logprobs.view(torch.bool).sum(), {}

    with pytest.raises(UserError, match="failed at node 'view'"):
        Graph.of(**encoded(loss))(torch.ones(3, requires_grad=True), {})
    assert not [name for name in METHODS if name.endswith("_")]  # none writes to its tensor


def plain(logprobs, sampled):
    return (logprobs * sampled).sum(), {"custom/x:sum": sampled.sum()}


def node(**fields):
    """Return a change of the node of the product."""
    return lambda graph: graph["graph"]["nodes"][2].update(fields)


def deep(depth: int):
    given = 1.0
    for _ in range(depth):
        given = [given]
    return given


REF = {"ref": "logprobs"}
REFUSED = {
    "call_function 'torch.load' is not allowed": node(target="torch.load"),
    "call_function 'torch.ops.aten.mul' is not": node(target="torch.ops.aten.mul"),
    "call_function 'builtins.eval' is not": node(target="builtins.eval"),
    "call_function 'operator.methodcaller' is": node(target="operator.methodcaller"),
    "call_method 'add_' is not allowed": node(op="call_method", target="add_"),
    "call_method 'backward' is not": node(op="call_method", target="backward"),
    "call_method '__class__' is not": node(op="call_method", target="__class__"),
    "call_method 'expand' is not": node(op="call_method", target="expand"),
    "call_module 'torch.add' is not": node(op="call_module", target="torch.add"),
    "get_attr 'weights' is not": node(op="get_attr", target="weights"),
    r"keywords \['out'\]": node(kwargs={"out": REF}),
    r"keywords \['device'\]": node(kwargs={"device": {"device": "cuda"}}),
    "argument '__globals__'": node(target="getattr", args=[REF, "__globals__"]),
    "argument 'cuda'": node(op="call_method", target="to", args=[REF, "cuda"]),
    "argument '9007199254740993'": node(args=[REF, (1 << 53) + 1]),
    "nested more than 8 times": node(args=[REF, deep(2000)]),
    "the loss is malformed at .*'mul'": node(args=[{"ref": "sum_1"}]),
    "the loss is malformed at .*'mul' ": node(args=[{"ref": ["logprobs"]}]),
    "the loss is malformed at .*'mul'  ": node(args=[{"dtype": "quint8"}]),
    "the loss is malformed at .*'mul'   ": node(args=[{"ref": "logprobs", "float": "1"}]),
    "the loss is malformed at .*'mul'    ": node(args=[{"float": 10**400}]),
    "the loss is malformed at its head": lambda g: g["graph"].pop("nodes"),
    "argument of kind 'layout'": node(args=[{"layout": "strided"}]),
    "has the name of a node before": node(name="logprobs"),
    "last node of the loss must be its one output": lambda g: g["graph"]["nodes"].pop(),
    r"metrics \['loss:sum'\]": lambda g: g["graph"]["nodes"][-1].update(
        args=[{"tuple": [{"ref": "sum_1"}, {"dict": {"loss:sum": 1.0}}]}]
    ),
    "the loss is malformed at .*'output'": lambda g: g["graph"]["nodes"][-1].update(args=[REF]),
    "the format of the graph must be 1": lambda g: g["graph"].update(format=2),
    f"the loss has {MAX_NODES + 1} nodes": lambda g: g["graph"].update(
        nodes=g["graph"]["nodes"][:1] * (MAX_NODES + 1)
    ),
    r"the graph reads \['logprobs', 'sampled'\], not": lambda g: g["inputs"].pop(),
    r"the graph reads \['sampled', 'logprobs'\], not logprobs": lambda g: (
        g["inputs"].reverse(),
        g["graph"].update(nodes=[g["graph"]["nodes"][n] for n in (1, 0, 2, 3, 4, 5)]),
    ),
}
"""Changes of a graph by what the error says."""


@pytest.mark.parametrize("text", REFUSED)
def test_a_graph_outside_the_lists_is_refused(text):
    given = copy.deepcopy(encoded(plain))
    REFUSED[text](given)
    with pytest.raises(UserError, match=text.rstrip()):
        Graph.of(**given)


FAILING = {
    "its result has an unknown type": node(target="getattr", args=[REF, "mean"]),
    "takes numbers here": node(target="operator.mul", args=["mean", 1 << 53]),
    "takes numbers here ": node(target="operator.mul", args=[[1.0], 1 << 53]),
    "takes numbers here  ": node(target="math.exp", args=[REF]),
    "takes numbers here   ": node(target="operator.mul", args=["mean", REF]),
    "out of range": node(target="operator.pow", args=[9, 1 << 50]),
    "an index is a tensor or a list": node(target="operator.getitem", args=[REF, [0, 0]]),
    "an index is a tensor or a list ": node(
        target="operator.getitem", args=[REF, {"tuple": [None, [0]]}]
    ),
    "an index is a tensor or a list  ": node(
        target="operator.getitem", args=[REF, {"tuple": [{"tuple": [0, 0]}]}]
    ),
    "must be int": node(
        target="torch.stack", args=[[REF, {"ref": "sampled"}]], kwargs={"dim": "mean"}
    ),
    "math domain error": node(target="math.log", args=[0]),
}
"""Nodes that fail by their values, by what the error says."""


@pytest.mark.parametrize("text", FAILING)
def test_an_operation_that_fails_is_an_error_of_the_client(text):
    given = copy.deepcopy(encoded(plain))
    FAILING[text](given)
    graph = Graph.of(**given)
    with pytest.raises(UserError, match=f"the loss failed at node 'mul': .*{text.rstrip()}"):
        graph(torch.ones(3, requires_grad=True), {"sampled": torch.ones(3)})


def test_inputs_have_the_dimensions_that_the_loss_was_traced_with():
    def loss(logprobs, scale):
        return (logprobs * scale).sum(), {}

    graph = Graph.of(**encoded(loss, 1, 0))
    leaf = torch.ones(3, requires_grad=True)
    assert graph(leaf, {"scale": torch.tensor([2.0])})[0] == 6
    for given in ({}, {"scale": torch.ones(2)}):
        with pytest.raises(UserError, match="needs dimensions {'logprobs': 1, 'scale': 0}"):
            graph(leaf, given)


def test_a_result_that_would_fill_the_memory_is_refused_before_it_is_made():
    def grown(logprobs):
        return (logprobs[:, None, None] * logprobs[:, None] * logprobs).sum(), {}

    graph = Graph.of(**encoded(grown))
    graph(torch.ones(20, requires_grad=True), {})
    with pytest.raises(UserError, match="too large"):
        graph(torch.ones(5000, requires_grad=True), {})

    def spread(logprobs):
        return torch.where(logprobs.reshape(*[1] * 59, -1) > 0)[0].sum() * logprobs.sum(), {}

    with pytest.raises(UserError, match="failed at node 'gt': its result is too large"):
        Graph.of(**encoded(spread))(torch.ones(1 << 21, requires_grad=True), {})


@pytest.mark.parametrize(
    "loss",
    [
        lambda logprobs: (logprobs, {}),
        lambda logprobs: (logprobs.detach().sum(), {}),
        lambda logprobs: (1.0, {}),
    ],
)
def test_a_loss_must_be_a_scalar_that_depends_on_logprobs(loss):
    with pytest.raises(UserError, match="must be a scalar that depends on logprobs"):
        Graph.of(**encoded(loss))(torch.ones(3, requires_grad=True), {})


LEAST = torch.iinfo(torch.int64).min


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize(
    "divided",
    [
        lambda x, y: x // y,
        lambda x, y: x % y,
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: torch.div(input=x, other=y, rounding_mode="floor"),
        lambda x, y: x.div(other=y, rounding_mode="trunc"),
    ],
)
def test_an_integer_division_without_a_result_is_an_error_of_the_client(divided, number):
    def loss(logprobs, x, y):
        return logprobs.sum() + divided(x, y).float().sum(), {}

    graph = Graph.of(**encoded(loss))
    leaf = torch.zeros(2, requires_grad=True)
    x, y = torch.tensor([5, LEAST]), torch.tensor([2, number])
    with pytest.raises(UserError, match="an integer is divided by 0, or the least integer by -1"):
        graph(leaf, {"x": x, "y": y})
    graph(leaf, {"x": x + 1, "y": y.clamp(max=-1)})
    graph(leaf, {"x": x.double(), "y": y})
