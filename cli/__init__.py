"""The command line. It talks to the daemon through `lorad.client` and to nothing else."""
