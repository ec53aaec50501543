"""Lists what is served in the form of OpenAI's models, from the table alone."""

from functools import partial

from aiohttp import web
from msgspec import Struct

from lorad.gateway.access import Access
from lorad.gateway.errors import no_such_model
from lorad.gateway.guard import VERSION, answer
from lorad.gateway.table import Table
from lorad.protocol.served import Served


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
    app.router.add_get("/v1/models", partial(_show, table, access))
    app.router.add_get("/v1/models/{model:.+}", partial(_show, table, access))


async def _show(table: Table, access: Access, request: web.Request) -> web.Response:
    """Show the model of the path, or list all: aliases, pinned versions, and the versions that aliases mean.

    The client learns only of models that it may see.
    """
    names = table.names()
    sees = access.viewer(request)
    versions = {name: served for name, served in names.versions.items() if sees(served.owner_uid)}
    aliases = {alias: name for alias, name in names.aliases.items() if name in versions}
    model = request.match_info.get("model")
    if model is None:
        aliased = [(alias, versions[name]) for alias, name in aliases.items()]
        return answer(_Models([_model_of(*named) for named in [*aliased, *versions.items()]]))
    served = versions.get(aliases.get(model, model))
    if served is None:
        raise no_such_model(model)
    return answer(_model_of(model, served), headers={VERSION: served.name})


def _model_of(name: str, served: Served) -> _Model:
    return _Model(name, int(served.created_at), served.name, served.model_path)
