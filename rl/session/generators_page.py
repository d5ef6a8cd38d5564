"""The page ``/generators``: how many there are, and a way to change that."""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl.errors import ConfigError
from rl.gateway.http import admit, read_body
from rl.gateway.protocol import ApiError, Strict, read
from rl.session.pool import GeneratorPool

MAX_BODY = 4096


class Wanted(Strict):
    """Body of a request that changes the number of generators."""

    replicas: Annotated[int, Field(ge=1)]


def generators_page(pool: GeneratorPool, key: str | None) -> Route:
    """Return the route of the generators of ``pool``. With a ``key``, every request needs it.

    PUT with ``{"replicas": N}`` asks for another number and does not wait for it; GET says what is
    asked for, and the state of each generator.
    """

    async def answer(request: Request) -> Response:
        admit(request, key, "a server")
        if request.method == "PUT":
            wanted = read(Wanted, await read_body(request, MAX_BODY))
            try:
                pool.ask(wanted.replicas)
            except ConfigError as error:
                raise ApiError(400, str(error), code="invalid_value", param="replicas") from None
        generators = {
            mesh.name: {"state": mesh.state, "requests": mesh.load, "policy_version": mesh.version}
            for mesh in pool.meshes
        }
        return JSONResponse({"replicas": pool.count_asked(), "generators": generators})

    return Route("/generators", answer, methods=["GET", "PUT"])
