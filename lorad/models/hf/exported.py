"""What a copy of a version says of its base where it is used."""

import json
from pathlib import Path

from lorad.adapters.directory import amend
from lorad.adapters.peft import CONFIG
from lorad.bounds import CONFIG_BYTES
from lorad.files import read_file
from lorad.models.directory import BUILTIN


def name_base(directory: Path) -> None:
    """Name the base of an exported version as transformers opens it.

    A base that ships with lorad gets its directory in place of `builtin:tiny`, and of a hub id the revision
    stands by itself.
    """
    try:
        settings = json.loads(read_file(directory / CONFIG, CONFIG_BYTES))
        base = str(settings["base_model_name_or_path"])
    except (ValueError, RecursionError, KeyError, TypeError):  # not of lorad's making
        return
    name, _, revision = base.partition("@")
    if base in BUILTIN:
        named = {"base_model_name_or_path": str(BUILTIN[base])}
    elif revision and not Path(base).is_absolute():
        named = {"base_model_name_or_path": name, "revision": revision}
    else:
        return
    amend(directory, CONFIG, json.dumps(settings | named, indent=2, sort_keys=True).encode() + b"\n")
