"""`lorad tui --serve`: the same screens in a browser on this machine, for who holds the printed URL and
nobody else.
"""
