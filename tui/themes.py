"""The looks: dark, light, high contrast, and the terminal's own sixteen colours."""

from textual.theme import Theme

# name in config.yaml -> Textual's
NAMES = {"dark": "textual-dark", "light": "textual-light", "contrast": "lorad-contrast", "ansi": "ansi-dark"}
CONTRAST = Theme(
    name="lorad-contrast",
    primary="#00ffff",
    secondary="#ffffff",
    accent="#ffff00",
    warning="#ffff00",
    error="#ff6060",
    success="#00ff00",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#303030",
    dark=True,
)


def next_name(theme: str) -> str:
    """Return the theme after `theme` in our list. Names are Textual's."""
    names = list(NAMES.values())
    return names[(names.index(theme) + 1) % len(names)] if theme in names else names[0]
