"""Writes a session's screens to stdout as textual-serve's packets."""

from textual import messages
from textual.drivers.web_driver import WebDriver


class Driver(WebDriver):
    """Ends the application when stdin ends: the browser is gone, or the server was killed."""

    def run_input_thread(self) -> None:
        super().run_input_thread()
        self._app.post_message(messages.ExitApp())
