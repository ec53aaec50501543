"""What trainers of several ranks share, in each of their ranks: slots, batches, optimizer steps,
checkpoints.
"""
