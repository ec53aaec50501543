"""Pure pieces of reinforcement learning: tasks, data, rewards, advantages and losses."""
