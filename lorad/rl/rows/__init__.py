"""What a row says, whatever its form."""
