"""The facts of one kind of server."""

from collections.abc import Mapping

from msgspec import Struct

Groups = tuple[tuple[str, ...], ...]


class ServerKind(Struct, frozen=True, kw_only=True):
    """Describes a kind of server before one is started. `Dialect` starts servers and speaks with them.

    Attributes:
        name: the backend, as a spec names it.
        title: as its users write it.
        engine, dialect: the classes, as "module:Class".
        distributions: what it is installed as, its usual name first.
        tried: the oldest version that lorad was tried with.
        cpu_steps: what pip does to install it for CPUs, with {version}; empty where only lorad's source tree
            can.
        modules: what must import where it is installed, and gpu_modules what must beside a GPU.
        joined: leaf names of linears that it takes adapters on only together.
        divided: by model type, the parts under whose names it takes adapters on a linear, all leaf names.
        targets: the leaf names of all linears that it takes adapters on; None: it has no such list.
        unserved: by model type, why it takes no adapters on some linears, and their leaf names.
        expert_types: model types on whose experts it was seen to serve adapters.
        reads_rslora: whether it scales an adapter by the root of its rank where PEFT does.
        reads_ranks: whether the modules of one adapter may have different ranks.
        records_routes: whether lorad was seen to get the experts of tokens from it.
        process_mib: MiB that it takes before it holds anything of a model.
        fills_cache: whether it writes to all of its memory for keys and values when it starts.
        sizes_by_leaf: whether it sets room aside for experts where linears of their names are adapted.
        schema_hint: how it is made to follow JSON schemas, for an error.
    """

    name: str
    title: str
    engine: str
    dialect: str
    distributions: tuple[str, ...]
    tried: str
    cpu_steps: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    gpu_modules: tuple[str, ...] = ()
    joined: Groups = ()
    divided: Mapping[str, Mapping[str, tuple[str, ...]]] = {}
    targets: frozenset[str] | None = None
    unserved: Mapping[str, tuple[str, tuple[str, ...]]] = {}
    expert_types: tuple[str, ...] = ()
    reads_rslora: bool = True
    reads_ranks: bool = True
    records_routes: bool = False
    process_mib: int = 0
    fills_cache: bool = False
    sizes_by_leaf: bool = False
    schema_hint: str = ""


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ROTATED = (
    "q_proj and k_proj of the base are reordered when it is loaded, those of adapters are not",
    ATTENTION[:2],
)
"""Why adapters on Llama 4 are served wrong."""
