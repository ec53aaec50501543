"""Lists what is served in the form of OpenAI's models, from the table alone."""

from functools import partial

from aiohttp import web
from msgspec import Struct

from lorad.gateway.access import GatewayAccess
from lorad.gateway.errors import no_such_model
from lorad.gateway.guard import VERSION, answer
from lorad.gateway.table import GatewayTable


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


def add_models(app: web.Application, table: GatewayTable, access: GatewayAccess) -> None:
    app.router.add_get("/v1/models", partial(_show, table, access))
    app.router.add_get("/v1/models/{model:.+}", partial(_show, table, access))


async def _show(table: GatewayTable, access: GatewayAccess, request: web.Request) -> web.Response:
    """Show the model of the path, or list all: aliases, pinned versions, and the versions that aliases mean.

    The client learns only of models that it may see.
    """
    names = table.names()
    sees = access.viewer(request)
    versions = {name: served for name, served in names.versions.items() if sees(served.owner_uid)}
    named = {alias: versions[name] for alias, name in names.aliases.items() if name in versions} | versions
    models = {
        name: _Model(name, int(served.created_at), served.name, served.model_path)
        for name, served in named.items()
    }
    name = request.match_info.get("model")
    if name is None:
        return answer(_Models([*models.values()]))
    if name not in models:
        raise no_such_model(name)
    return answer(models[name], headers={VERSION: models[name].root})
