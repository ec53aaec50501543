"""Lists what is served in the form of OpenAI's models, from the table alone."""

from functools import partial

from aiohttp import web
from msgspec import Struct

from lorad.gateway.access import Access
from lorad.gateway.errors import no_such_model
from lorad.gateway.guard import VERSION, answer
from lorad.gateway.table import Table
from lorad.protocol.served import Names, Served


class _Model(Struct, frozen=True):
    """A model as OpenAI describes it, with two fields of vLLM's."""

    id: str
    created: int
    root: str  # the version
    parent: str  # its base
    object: str = "model"
    owned_by: str = "lorad"


class _Models(Struct, frozen=True):
    data: list[_Model]
    object: str = "list"


def add_models(app: web.Application, table: Table, access: Access) -> None:
    app.router.add_get("/v1/models", partial(_list_models, table, access))
    app.router.add_get("/v1/models/{model:.+}", partial(_show_model, table, access))


def _seen(table: Table, access: Access, request: web.Request) -> Names:
    """Return the names that the client may see."""
    names, sees = table.names(), access.viewer(request)
    versions = {name: served for name, served in names.versions.items() if sees(served.owner_uid)}
    return Names({alias: name for alias, name in names.aliases.items() if name in versions}, versions)


async def _list_models(table: Table, access: Access, request: web.Request) -> web.Response:
    """Aliases first, then pinned versions and those that aliases mean."""
    names = _seen(table, access, request)
    aliases = [(alias, names.versions[name]) for alias, name in names.aliases.items()]
    models = [_model_of(name, served) for name, served in [*aliases, *names.versions.items()]]
    return answer(_Models(models))


async def _show_model(table: Table, access: Access, request: web.Request) -> web.Response:
    names, asked = _seen(table, access, request), request.match_info["model"]
    served = names.versions.get(names.aliases.get(asked, asked))
    if served is None:
        raise no_such_model(asked)
    return answer(_model_of(asked, served), headers={VERSION: served.name})


def _model_of(name: str, served: Served) -> _Model:
    return _Model(name, int(served.created_at), served.name, served.model_path)
