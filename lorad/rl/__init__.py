"""What a run learns from (rows, templates, rewards), and the formulas of advantages and losses.

Rows come from files, the hub or tasks; templates are rendered in a process of their own; formulas get arrays
and are pure.

A builtin reward is a function of `rl/reward.py`, a task one of `rl/tasks.py`, a loss its formula in
`rl/loss.py` by the names of `spec/algorithm.py`. What step n trains on follows from the spec alone.
`tests/rl/test_goldens.py` holds the formulas by the code of who published them, the rest of `tests/rl/` the
rows.
"""
