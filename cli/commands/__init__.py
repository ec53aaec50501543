"""One file per verb; each is imported only when its verb is typed."""
