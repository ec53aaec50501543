"""Notifications: a process runs the commands and posts to the addresses that `notify` of a spec names.

It reads `table.json` of the daemon, which notes in its outbox what is due, and writes what was delivered.

A way to deliver is a function beside `notify/webhook.py`; who is told of what is decided in
`notify/outbox.py` alone. A try that failed is made again after growing waits, for a bounded time.
`tests/notify/` holds outbox, tries and waits.
"""
