"""Endpoints: methods of an actor that the controller calls, with the types of the methods."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, cast

from monarch.actor import concurrent_endpoint

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Span = tuple[str, float, float]
"""Name of some work, and its begin and end in Unix seconds of the rank's host."""


class Endpoint(Generic[P, R]):
    """Type of an endpoint, as its class has it: ``ranks.call(PolicyTrainer.push_weights, 3)``."""

    name: str


class Timed(NamedTuple):
    """Answer of an endpoint with the times of the rank's own work, which the group takes out."""

    answer: Any
    work: Sequence[Span]


def endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]]) -> Endpoint[P, R]:
    """Make a method of an actor an endpoint. Calls of endpoints overlap."""
    made = concurrent_endpoint(method)
    made.name = method.__name__  # type: ignore[attr-defined]
    return cast(Endpoint[P, R], made)


def timed(answer: R, work: Sequence[Span]) -> R:
    """Return the answer of an endpoint to its caller, and the rank's own work to the group."""
    return cast(R, Timed(answer, work))
