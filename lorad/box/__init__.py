"""What holds for a whole machine: its configuration, where files lie, tokens, and what it grants."""
