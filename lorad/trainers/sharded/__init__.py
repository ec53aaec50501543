"""What all trainers of several ranks do in each rank: slots, batches, optimizer steps, checkpoints."""
