"""Who used how much of the box: take in what pools report, and answer for it."""
