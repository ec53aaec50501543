"""Lists what is served in the form of OpenAI's models, from the table alone."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from lorad.gateway.access import Access
from lorad.gateway.errors import no_such_model
from lorad.gateway.guard import VERSION, answer
from lorad.gateway.table import Table
from lorad.protocol.served import Names, Served


def add_models(app: web.Application, table: Table, access: Access) -> None:
    app.router.add_get("/v1/models", partial(list_models, table, access))
    app.router.add_get("/v1/models/{model:.+}", partial(show_model, table, access))


def seen(table: Table, access: Access, request: web.Request) -> Names:
    """Return the names that the client may see."""
    names, sees = table.names(), access.viewer(request)
    versions = {name: served for name, served in names.versions.items() if sees(served.owner_uid)}
    return Names({alias: name for alias, name in names.aliases.items() if name in versions}, versions)


async def list_models(table: Table, access: Access, request: web.Request) -> web.Response:
    """Aliases first, then pinned versions and those that aliases mean."""
    names = seen(table, access, request)
    aliases = [(alias, names.versions[name]) for alias, name in names.aliases.items()]
    models = [model_of(name, served) for name, served in [*aliases, *names.versions.items()]]
    return answer({"object": "list", "data": models})


async def show_model(table: Table, access: Access, request: web.Request) -> web.Response:
    names, asked = seen(table, access, request), request.match_info["model"]
    served = names.versions.get(names.aliases.get(asked, asked))
    if served is None:
        raise no_such_model(asked)
    return answer(model_of(asked, served), headers={VERSION: served.name})


def model_of(name: str, served: Served) -> dict[str, Any]:
    """Return a model as OpenAI describes it, with vLLM's fields root (the version) and parent (its base)."""
    about = {"root": served.name, "parent": served.model_path}
    return {"id": name, "object": "model", "created": int(served.created_at), "owned_by": "lorad", **about}
