"""The rollout engines: they generate with any loaded adapter version, per request.

Versions come from the pool, from memory or as directories; tokens from the builtin decoder, from
transformers, or from servers.

A kind of server is a `Dialect` in a folder of its own; the contract is `engines/base.py`. A version is
attested under a name that is never used again. Every engine passes `tests/conformance/engine_suite.py`;
`tests/engines/` has what is particular to each, and the suites against real servers.
"""
