"""The loggers that come with lorad; each imports its library when it is used."""
