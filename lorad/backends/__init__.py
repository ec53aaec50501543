"""Which trainers and engines there are, how they are installed, and whether they work here."""
