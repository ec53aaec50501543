"""Models whose forward is transformers' own."""
