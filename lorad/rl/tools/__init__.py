"""Tools that a model may call: how they are described to it, and how its calls are read."""
