"""The base model of Megatron-Bridge and Megatron Core, cut over ranks, with adapters of Bridge's own LoRA
classes.
"""
