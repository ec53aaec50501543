"""Shards any Hugging Face causal LM over data-parallel ranks, with transformers, PEFT and FSDP2."""
