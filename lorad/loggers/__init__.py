"""Experiment loggers: a process follows journals and writes their figures to TensorBoard, MLflow, W&B."""
