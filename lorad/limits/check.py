"""Check a trainer and an engine against all limits.

The preflight asks with what a spec and its model say, the pool and the ranks of a trainer with what they are
started with: both refuse the same in the same words.
"""

from msgspec.structs import replace

from lorad.adapters.adapter import AdapterConfig
from lorad.errors import AdapterRefused, SpecError
from lorad.limits.limit import BackendSetup
from lorad.limits.of_engines import OF_ENGINES
from lorad.limits.of_trainers import OF_TRAINERS


def check(setup: BackendSetup) -> list[SpecError]:
    """Return an error for each limit that a setup breaks, as far as its parts are known."""
    tables = (OF_TRAINERS, ""), (OF_TRAINERS, setup.trainer), (OF_ENGINES, ""), (OF_ENGINES, setup.engine)
    errors = []
    for limit in (limit for table, name in tables for limit in table.get(name, ())):
        if it := limit.breaks(setup):
            key, why, hint = (text.format(s=setup, it=it) for text in (limit.key, limit.why, limit.hint))
            errors.append(SpecError(why, key=key, hint=hint))
    return errors


def refuse(setup: BackendSetup) -> None:
    """Raise SpecError for the first limit that a setup breaks, with the others beside it."""
    if errors := check(setup):
        errors[0].others = tuple(errors[1:])
        raise errors[0]


def refuse_adapter(setup: BackendSetup, adapter: AdapterConfig, lora_type: str = "canonical_lora") -> None:
    """Raise AdapterRefused for an adapter that a backend, which was started like this, cannot have."""
    try:
        refuse(replace(setup, adapter=adapter, rank=adapter.rank, lora_type=lora_type))
    except SpecError as error:
        raise AdapterRefused(error.message, hint=error.hint, others=error.others) from None
