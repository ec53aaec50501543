"""What forecasts of starts are made of, the pace of runs, and what became of those that were given."""
