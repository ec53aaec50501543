"""Files of runs: prune checkpoints and versions, and delete what nothing refers to."""
