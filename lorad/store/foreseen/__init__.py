"""Forecasts of when runs start: the pace of runs, from which they are made, and how right they were."""
