"""The trainer that shards any Hugging Face causal LM over data-parallel ranks: transformers,
PEFT and FSDP2.
"""
