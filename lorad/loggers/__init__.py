"""Experiment loggers: a process follows journals and writes their figures to TensorBoard, MLflow, W&B.

It reads `table.json` of the daemon and the journals that it names, and keeps a cursor beside each.

Another logger implements `loggers/logger.py`, here or in a package of somebody's. What a rewind took back is
never shown as if it counted. `tests/loggers/` reads back what each one wrote, after kills and on a full disk.
"""
