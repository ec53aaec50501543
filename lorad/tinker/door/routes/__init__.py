"""The routes of the door, by what they are about."""
