"""The page ``/metrics``, which Prometheus reads."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rl.gateway.http import admit, serving
from rl.host.listening import address_of
from rl.observe.events import Events
from rl.observe.prometheus import Numbers
from rl.session.session import Session


def metrics_page(numbers: Numbers, session: Callable[[], Session | None], key: str | None) -> Route:
    """Return the route of ``numbers`` and the figures of the generators of ``session``, which may
    not exist yet. With a ``key``, every request needs it.
    """

    async def answer(request: Request) -> Response:
        admit(request, key, "a page")
        current = session()
        numbers.engines = {} if current is None else await current.pool.figures()
        return Response(generate_latest(numbers.registry), media_type=CONTENT_TYPE_LATEST)

    return Route("/metrics", answer)


@asynccontextmanager
async def metrics_server(
    address: str, name: str, events: Events, session: Callable[[], Session | None]
) -> AsyncIterator[None]:
    """Serve the page of the run ``name`` at ``address``, that of ``sinks.prometheus``, while the
    block runs.
    """
    host, port, key = address_of(address, "sinks.prometheus")
    numbers = Numbers(name)
    events.subscribe(numbers.write)
    page = metrics_page(numbers, session, key)
    field = f"sinks.prometheus {address}"
    async with serving(None, host=host, port=port, key=key, more=[page], given=field) as url:
        events.note(f"metrics for Prometheus on {url}/metrics")
        yield
