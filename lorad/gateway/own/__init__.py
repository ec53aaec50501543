"""The gateway of one owner: OpenAI's API over the pools of that home."""
