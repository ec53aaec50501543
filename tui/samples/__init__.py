"""The samples tab: what the model wrote, searched and compared."""
