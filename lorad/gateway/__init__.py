"""The gateway: OpenAI's API over what is served, in a process of its own that survives the daemon."""
