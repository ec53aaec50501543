"""Rollout engines that are servers in processes of their own: what is common to SGLang and vLLM."""
