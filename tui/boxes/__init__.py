"""Several boxes at once: one screen has a row for each, another one the runs of all."""
