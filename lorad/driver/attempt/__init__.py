"""What every driver does with its attempt, whatever its loop is."""
