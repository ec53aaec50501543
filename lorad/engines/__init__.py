"""The rollout engines: they generate with any loaded adapter version, per request."""
