"""Custom losses of the tests, traced and encoded as the SDK does it."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.node import _get_qualified_name


def encoded(loss: Callable[..., Any], *ranks: int) -> dict[str, Any]:
    """Return the graph and inputs of a loss; ``ranks`` are those of its inputs, 1 by default."""
    traced = torch.fx.symbolic_trace(loss)
    nodes = [
        {
            "op": node.op,
            "name": node.name,
            "target": target_of(node),
            "args": [argument(each) for each in node.args],
            "kwargs": {key: argument(each) for key, each in node.kwargs.items()},
        }
        for node in traced.graph.nodes
    ]
    names = [*inspect.signature(loss).parameters]
    ranks = ranks or (1,) * len(names)
    inputs = [{"name": n, "rank": rank} for n, rank in zip(names, ranks, strict=True)]
    return {"graph": {"format": 1, "nodes": nodes}, "inputs": inputs}


def target_of(node: torch.fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    return _get_qualified_name(node.target).replace("_operator.", "operator.")


def argument(given: Any) -> Any:
    if isinstance(given, torch.fx.Node):
        return {"ref": given.name}
    if isinstance(given, float) and not math.isfinite(given):
        return {"float": str(given)}
    if isinstance(given, tuple):
        return {"tuple": [argument(each) for each in given]}
    if isinstance(given, list):
        return [argument(each) for each in given]
    if isinstance(given, dict):
        return {"dict": {key: argument(each) for key, each in given.items()}}
    if isinstance(given, slice):
        return {"slice": [argument(each) for each in (given.start, given.stop, given.step)]}
    if given is Ellipsis:
        return {"ellipsis": True}
    if isinstance(given, torch.dtype | torch.device):
        return {type(given).__name__: str(given).removeprefix("torch.")}
    return given
