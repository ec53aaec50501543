"""The client of the daemon: a method for each request, and the HTTP by which they are asked."""
