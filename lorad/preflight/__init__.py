"""The check of a spec before anything starts: model, data, reward, backends and memory.

It gets one question of the daemon on stdin and reads what the spec names as the user of the run; it prints
one answer.

A check is a function in the file of its subject, called in `preflight/__main__.py`; what a backend cannot do
is a row in `limits/`. Memory is foreseen part by part in `preflight/pool_memory.py`. `tests/preflight/` holds
every refusal with its words.
"""
