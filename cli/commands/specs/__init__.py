"""Commands about a spec that is no run yet."""
