"""Suites of behaviour that every backend passes: subclass one, say how to make a backend, and pytest does the
rest.
"""

import pytest

ENGINE = ["engine_suite"]
TRAINER = ["trainer_kit", "trainer_numbers", "trainer_gradients", "trainer_slots", "trainer_checkpoints"]
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in [*ENGINE, *TRAINER]))
