"""The process that is a run's RL loop: it samples, scores, weighs, trains and publishes.

It reads its attempt's `params.json`, rows and the pool's answers, and writes the run's journal. It holds no
weights.

A step stands in `driver/driver.py`, or `driver/supervised.py` for sft and dpo; each verb has a file of its
name. A fact is in the journal before it takes effect, and a resume comes to the same bits. `tests/driver/`
holds the verbs in real pools, `tests/end_to_end/test_resume.py` the bits.
"""
