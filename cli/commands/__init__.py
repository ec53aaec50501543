"""The verbs, in files by subject; one is imported only when a verb of it is typed."""
