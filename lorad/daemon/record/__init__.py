"""The truth on disk: rebuild, verify and audit what the database says."""
