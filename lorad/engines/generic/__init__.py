"""An engine over the forward and the cache that transformers has for a model: slow, and right for every
architecture that the FSDP trainer opens.
"""
