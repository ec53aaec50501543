"""One base model kept warm: hosts a trainer and an engine, and the socket that drivers call.

It starts from `pool.json` of the daemon, and knows of runs only what their calls say.

A verb is a Struct of `protocol/calls.py` and a function in `pool/verbs/`. Fencing comes before every effect,
attestation before every use of a version. `tests/pool/` holds verbs and turns,
`tests/pool/test_attestation_judges.py` that each planted fault is seen.
"""
