"""The life of one run: create, check, launch, take in what it writes, and settle its end."""
