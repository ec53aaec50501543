"""Notifications: a process runs the commands and posts to the addresses that `notify` of a spec names."""
