"""Check which pools can be on nodes."""

from lorad.errors import SpecError
from lorad.protocol.nodes import NodesSetup
from lorad.protocol.pool_setup import PoolSetup
from lorad.servers.table import NAMES


def checked_nodes(config: PoolSetup) -> NodesSetup:
    """Return what a pool asks for. Raises SpecError for a part that would need a device of this machine."""
    nodes = config.nodes
    if nodes is None or (config.mode == "split") != bool(nodes.rollout_nodes):
        raise SpecError(
            "split is for servers on nodes of their own, and asks for some",
            key="pool.mode",
            hint="Set resources.rollout_nodes with pool.mode: split, or neither.",
        )
    if nodes.rollout_nodes and config.server is None:
        raise SpecError(
            f"the {config.engine} engine has no servers that could be on nodes of their own",
            key="resources.rollout_nodes",
            hint=f"Use {NAMES}, or leave it out.",
        )
    if not config.has_ranks:
        raise SpecError(
            f"the {config.trainer} trainer is not made of ranks, which nodes can have",
            key="trainer.backend",
            hint="Use fsdp or megatron, not pool.mode: fused, or leave resources.nodes out.",
        )
    if config.device != "cpu" and (config.server is None or config.teacher_path):
        what = "a teacher" if config.teacher_path else f"the {config.engine} engine"
        raise SpecError(
            f"{what} would need a GPU of this machine, and the pool has those of nodes alone",
            key="resources.nodes",
            hint=f"Use {NAMES}, and no teacher, on nodes.",
        )
    return nodes
