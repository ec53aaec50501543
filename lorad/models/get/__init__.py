"""Models out of packages, turned into Hugging Face directories without torch."""
