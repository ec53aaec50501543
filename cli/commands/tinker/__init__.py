"""The commands of `lorad tinker`: the door for Tinker's client."""
