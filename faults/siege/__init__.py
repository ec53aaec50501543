"""A shared daemon besieged by one of its users: `python -m faults.siege`."""
