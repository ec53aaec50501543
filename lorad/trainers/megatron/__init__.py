"""The base of Megatron-Bridge and Megatron Core, cut over ranks, with adapters of Bridge's LoRA classes."""
