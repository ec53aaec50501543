"""Products of rows with frozen weights, in the forms that are quickest on this machine."""
