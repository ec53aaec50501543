"""Serve `/metrics` and nothing else on 127.0.0.1, for Prometheus, and only by the names of that address."""

import contextlib
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from lorad.daemon.api.metrics import CONTENT_TYPE, exposition
from lorad.daemon.context import Context
from lorad.http.serve import LOCAL, serve

_NAMES = frozenset({LOCAL, "localhost"})  # a page that lets its own name point here (DNS rebinding) sends it


def serve_metrics(ctx: Context) -> AbstractAsyncContextManager[None]:
    """Serve the metrics on `metrics.port` of the configuration, if it is set and nobody else has it."""
    port = ctx.config.metrics.port
    if port is None:
        return contextlib.nullcontext()

    async def answer(request: web.Request) -> web.Response:
        host = request.headers.get("Host", "")
        name, _, number = host.rpartition(":") if ":" in host else (host, "", str(port))
        if name.lower() not in _NAMES or number != str(port):
            return web.Response(status=403, text="ask by the name of 127.0.0.1 or localhost\n")
        if request.headers.get("Origin"):
            return web.Response(status=403, text="not for web pages\n")
        if request.method not in ("GET", "HEAD") or request.path != "/metrics":
            return web.Response(status=404, text="GET /metrics\n")
        return web.Response(text=await exposition(ctx), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application(client_max_size=1024)
    app.router.add_route("*", "/{rest:.*}", answer)
    return serve(app, [port], ctx.requests.bounds, name="/metrics", goodbye=1.0)
