"""Data that hold the completions to train on."""
