"""Environments: tasks of several turns, in which the model reads what its words led to.

Your own one needs `Env`, `Observation` and `Turn` of `lorad.envs.protocol`.
"""
