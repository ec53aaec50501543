"""An agent: the SDK's own client, speaking with the server of `lorad mcp` in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp.client import Client as AgentClient

from lorad.cli.commands.mcp.bounds import AgentBounds
from lorad.cli.commands.mcp.server import make_server
from lorad.client.client import Client


class Agent:
    """Calls tools: `await agent("box")` is its answer."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def __call__(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        result = await self._client.call_tool(tool, arguments)
        assert not result.is_error, result.content[0].text
        answer: dict[str, Any] = result.structured_content
        return answer

    async def refused(self, tool: str, /, **arguments: Any) -> str:
        """Return the words of a refusal."""
        result = await self._client.call_tool(tool, arguments)
        assert result.is_error
        return str(result.content[0].text)

    async def tools(self) -> dict[str, Any]:
        return {tool.name: tool for tool in (await self._client.list_tools()).tools}


@asynccontextmanager
async def agent_of(
    client: Client, *allowed: str, base: Path = Path("/"), **bounds: Any
) -> AsyncIterator[Agent]:
    server = make_server(client, AgentBounds(frozenset(allowed), base, **bounds))
    async with AgentClient(server) as connected:
        yield Agent(connected)
