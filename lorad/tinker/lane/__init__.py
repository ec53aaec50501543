"""The driver of a run whose requests come from Tinker's client: one lane for each model."""
