"""Processes under a guard, which end with the process that started them, whatever dies first.

Its data are what the kernel says of a process, and the lines that child and parent exchange.

Who needs a process starts it here: `children/process.py` where it lives as long as a pool, `children/ask.py`
for one block of asyncio, `children/user_process.py` for user code. The guard imports the standard library
alone, and a process is known by boot, pid and start, never by a pid. `tests/children/` kills each side and
looks who is left.
"""
