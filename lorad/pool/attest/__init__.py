"""A version serves what was trained: made sure of before anybody may ask for it."""
