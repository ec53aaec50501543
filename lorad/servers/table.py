"""All kinds of servers that lorad starts, or that users run for it."""

from typing import Literal

from lorad.servers import sglang, vllm

SERVERS = {kind.name: kind for kind in (sglang.KIND, vllm.KIND)}
NAMES = " or ".join(SERVERS)
Server = Literal["sglang", "vllm"]  # the same names, for an option of a command
