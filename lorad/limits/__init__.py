"""What trainers and engines cannot do: a row for each limit, read before a run starts and where it starts."""
