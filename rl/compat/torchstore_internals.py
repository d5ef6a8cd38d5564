"""torchstore, with a controller that this Monarch accepts.

The controller of torchstore has sync and async endpoints, but Monarch accepts only one kind per
actor. The sync ones are made async.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from monarch.actor import endpoint

# otherwise torchstore sets it and configures logging too
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(1 << 40))
import torchstore
import torchstore.api

__all__ = ["torchstore"]


def _as_async(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def answer(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return answer


class Controller(torchstore.api.Controller):
    """torchstore's controller with async endpoints only; processes import it from this module."""


for _name in dir(Controller):
    _method = getattr(inspect.getattr_static(Controller, _name), "_method", None)
    if _method is not None and not inspect.iscoroutinefunction(_method):
        setattr(Controller, _name, endpoint(_as_async(_method)))
torchstore.api.Controller = Controller
