"""The line behind `:`: commands with arguments, completed from what the daemon knows."""
