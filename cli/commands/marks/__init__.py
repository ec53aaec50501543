"""What users write on runs: tags, notes, groups, and changes of what is queued."""
