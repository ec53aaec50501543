"""Turn models out of packages into Hugging Face directories, without torch."""
