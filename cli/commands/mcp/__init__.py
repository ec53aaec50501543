"""The command `lorad mcp`: lorad as tools of the Model Context Protocol, for agents."""
