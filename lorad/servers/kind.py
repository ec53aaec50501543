"""The facts of one kind of server."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

Groups = tuple[tuple[str, ...], ...]


class Parts(Struct, frozen=True):
    """The linears under whose names a server takes an adapter on one linear.

    names: their leaf names, in the order of the rows of B.
    last: the leaf name of a linear beside it that has as many rows as the last part, and the other parts
        share the rest; "" where all parts have as many.
    """

    names: tuple[str, ...]
    last: str = ""


class ServerKind(Struct, frozen=True, kw_only=True):
    """Describes a kind of server before one is started. `Dialect` starts servers and speaks with them.

    name: the backend, as a spec names it.
    title: as its users write it.
    engine, dialect: the classes, as "module:Class".
    distributions: what it is installed as, its usual name first.
    tried: the oldest version that lorad was tried with.
    modules: what must import where it is installed, and gpu_modules what must beside a GPU.
    joined: leaf names of linears that it takes adapters on only together.
    divided: by model type, the linears that it takes adapters on in parts, by leaf name.
    called: what its target_modules call such parts, by leaf name, where they have another name there.
    targets: the leaf names of all linears that it takes adapters on; None: it has no such list.
    further: by model type, the leaf names of linears that it takes adapters on beside `targets`.
    unserved: by model type, why it takes no adapters on some linears, and their leaf names.
    foreign: by model type, why it serves no adapters at all.
    whole_heads: model types whose heads it rotates as a whole, whatever config.json says.
    gpu_types: by model type, why it serves no adapters where there is no GPU.
    gpu_mixtures: the same of those that have experts.
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
    modules: tuple[str, ...] = ()
    gpu_modules: tuple[str, ...] = ()
    joined: Groups = ()
    divided: Mapping[str, Mapping[str, Parts]] = {}
    called: Mapping[str, str] = {}
    targets: frozenset[str] | None = None
    further: Mapping[str, tuple[str, ...]] = {}
    unserved: Mapping[str, tuple[str, tuple[str, ...]]] = {}
    foreign: Mapping[str, str] = {}
    whole_heads: tuple[str, ...] = ()
    gpu_types: Mapping[str, str] = {}
    gpu_mixtures: Mapping[str, str] = {}
    expert_types: tuple[str, ...] = ()
    reads_rslora: bool = True
    reads_ranks: bool = True
    records_routes: bool = False
    process_mib: int = 0
    fills_cache: bool = False
    sizes_by_leaf: bool = False
    schema_hint: str = ""

    def takes(self, linears: Iterable[str], model_type: str) -> set[str]:
        """Return those of a model's linears, by leaf name, that it takes adapters on."""
        linears = {*linears}
        if self.targets is not None:
            linears &= {*self.targets, *self.further.get(model_type, ())}
        return linears - {*self.unserved.get(model_type, ("", ()))[1]}


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
DELTA = ("in_proj_qkv", "in_proj_z")  # one product of gated delta nets
ROTATED = (
    "q_proj and k_proj of the base are reordered when it is loaded, those of adapters are not",
    ATTENTION[:2],
)
"""Why adapters on Llama 4 are served wrong."""
KERNELS = "on a CPU it lacks kernels for it"
UNCLAMPED = "its trainer keeps time steps above time_step_min of config.json, the server does not"
"""Why no server serves what is trained of Nemotron-H: versions were off by a rel of 0.0016."""
