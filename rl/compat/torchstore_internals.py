"""torchstore, made fit for this Monarch where it has to be.

The controller of the released 0.1.2 has sync and async endpoints, and Monarch takes one kind per
actor. Where that is so, its sync ones are made async. Newer versions have one kind, and are left as
they are.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from monarch.actor import endpoint

os.environ.setdefault(
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(1 << 40)
)  # else torchstore sets it, and up logging
import torchstore
import torchstore.api

__all__ = ["torchstore"]

RELIES_ON = {
    "torchstore.api:Controller": "torchstore.initialize spawns it and takes no other",
    "monarch._src.actor.endpoint:EndpointProperty._method": (
        "an endpoint does not say otherwise whether it is async"
    ),
}


def _endpoints(actor: type) -> dict[str, Callable[..., Any]]:
    attributes = {name: inspect.getattr_static(actor, name) for name in dir(actor)}
    return {name: value._method for name, value in attributes.items() if hasattr(value, "_method")}


def _made_async(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def answer(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return answer


class Controller(torchstore.api.Controller):
    """torchstore's, with async endpoints only; processes find it under this module's name."""


_methods = _endpoints(torchstore.api.Controller)
_sync = {
    name: method for name, method in _methods.items() if not inspect.iscoroutinefunction(method)
}
if _sync and len(_sync) < len(_methods):
    for _name, _method in _sync.items():
        setattr(Controller, _name, endpoint(_made_async(_method)))
    torchstore.api.Controller = Controller
