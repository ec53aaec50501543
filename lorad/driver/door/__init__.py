"""The door for agent programs: an episode has a chat, in three dialects, and every token is written down."""
