"""SGLang as a rollout engine: `launch.py` runs in its virtual environment, `dialect.py` speaks to it."""
