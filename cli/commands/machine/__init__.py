"""The commands about what this machine has installed for lorad."""
