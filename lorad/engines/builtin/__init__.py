"""The builtin engine: batched decoding with a key-value cache on the base model that the pool's trainer uses
too.
"""
