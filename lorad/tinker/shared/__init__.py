"""The front of a home that several users share: it passes each request to the door of its key's owner."""
