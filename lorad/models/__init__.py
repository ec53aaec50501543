"""What lorad knows of models on disk, and the builtin backend's forward over one frozen base.

Weights and settings come from Hugging Face directories, as safetensors and JSON; nothing is unpickled.

A family that the builtin backend computes is a row of `models/families.py`; the order of its operations is
what digests rest on. `tests/models/` compares it with transformers.
"""
