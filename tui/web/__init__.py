"""The same screens in a browser on this machine (`lorad tui --serve`), for who holds the printed URL."""
