"""Find out why a run does not learn, by rules that read its figures.

Figures come from the daemon's answers, gathered once in `why/facts.py`; rules are pure.

A finding is a function in the file of its subject and its line in `why/table.py`, in the order of causes.
`tests/why/test_rules.py` holds each rule, `tests/why/test_pathologies.py` runs that were made ill on purpose.
"""
