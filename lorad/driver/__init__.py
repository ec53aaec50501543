"""The process that is a run's RL loop; it holds no model weights."""
