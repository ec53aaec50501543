"""The front of a home that several users share: it passes each request to its owner's gateway."""
