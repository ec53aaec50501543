"""The serving screen: aliases, their traffic, and a chat with what is served."""
