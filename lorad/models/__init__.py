"""The lean forward of the builtin backend: one frozen, fused base model, shared by its trainer and its
engine.
"""
