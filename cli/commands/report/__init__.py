"""Write runs as one HTML page that loads nothing, for `lorad report`."""
