"""Names that SGLang imports for gated delta nets; `plain_delta.py` replaces what would call them."""


def __getattr__(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)
