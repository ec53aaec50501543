"""The door for agent programs: OpenAI's chat for one episode each, with every token written down."""
