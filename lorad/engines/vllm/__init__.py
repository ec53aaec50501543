"""The rollout engine that speaks with vLLM."""
