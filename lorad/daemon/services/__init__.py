"""Services: the processes that the daemon keeps up beside the runs, such as the gateway."""
