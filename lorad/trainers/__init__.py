"""The services that compute log-probabilities, gradients and optimizer steps for adapters.

Batches come as `protocol/batch.py` has them, the base from its directory; adapters leave as fp32 arrays.

The contract is `trainers/base.py`; a trainer of several ranks brings a `Body` of `trainers/sharded/body.py`.
The base never changes, and a slot's numbers do not depend on its neighbours. Every trainer passes
`tests/conformance/trainer_suite.py`.
"""
