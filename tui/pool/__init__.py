"""The screen of a pool: who has its slots, who waits, what it takes, and what it prints."""
