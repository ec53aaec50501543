"""Environments: tasks of several turns, in which the model reads what its words led to.

Observations come from processes of user code, one episode at a time; tokens from the chat template or a
renderer.

Your own environment needs `Env`, `Observation` and `Turn` of `lorad.envs.protocol`; a kind that plays others'
environments is a child beside `envs/child.py`. The tokens of an episode only grow. `tests/envs/` holds the
children, `tests/end_to_end/test_environment_kills.py` that a killed one harms no other episode.
"""
