"""The screen of one run, with a tab for each thing that can be known of it."""
