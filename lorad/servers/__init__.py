"""What lorad knows of each kind of server that samples: a file for each, which imports and starts nothing."""
