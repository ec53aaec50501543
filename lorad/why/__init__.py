"""Find out why a run does not learn, by rules that read its figures."""
