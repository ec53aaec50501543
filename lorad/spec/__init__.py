"""What a run is asked to do: the keys of a spec, their YAML, and how mistakes are reported."""
