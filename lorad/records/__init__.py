"""What lorad is about, each thing told once: a run, a version, a pool, a device, a bill.

They are shapes and compute nothing: the store reads them from rows, the daemon answers with them, commands
print them.

A field is added here, and by a migration where the database keeps it; a request is a row of
`records/routes.py`. `tests/daemon/api/test_schemas.py` holds all fields with types and defaults,
`tests/daemon/api/test_answers.py` the JSON.
"""
