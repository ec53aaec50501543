"""Find out whether lorad can use a trainer here, for `lorad doctor --trainer KIND`.

    python -m lorad.backends.trainer_probe KIND

Writes JSON on stdout, {"check": InterpreterFinding} for each. Exits with 0 when it could say what is the
matter, whatever that is.
"""

import argparse
import os
from collections.abc import Iterator

import msgspec

from lorad.backends import installed
from lorad.box.config import Backend, load
from lorad.box.paths import Home, default_home
from lorad.children.interpreter import InterpreterFinding, Requirements, installation
from lorad.errors import LoradError

WANTED = {
    "fsdp": Requirements(
        ("transformers", "peft"), ("torch.distributed.fsdp", "transformers", "peft", "accelerate", "msgspec")
    ),
    "megatron": Requirements(
        ("transformers", "transformer-engine", "triton", "peft"),
        ("megatron.core", "megatron.bridge", "megatron.bridge.peft.lora", "msgspec"),
        for_gpus=("transformer_engine.pytorch",),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lorad.backends.trainer_probe")
    parser.add_argument("kind", choices=sorted(installed.NEEDED))
    for finding in _findings(parser.parse_args().kind):
        os.write(1, msgspec.json.encode({"check": finding}) + b"\n")


def _findings(kind: str) -> Iterator[InterpreterFinding]:
    try:
        backend = load(Home(default_home()).config).backends.get(kind, Backend())
    except LoradError as error:
        yield InterpreterFinding("config", False, error.message, error.hint)
        return
    try:
        python = installed.interpreter_of(kind, backend.python)
        versions = installed.installed_versions(kind, python)
    except LoradError as error:
        yield InterpreterFinding("interpreter", False, error.message, error.hint)
        return
    old = installed.older(kind, versions)
    packages = ", ".join(f"{name} {versions[name]}" for name in installed.TRIED[kind])
    about = f" ({'; '.join(old)})" if old else ""
    facts = {"python": str(python), "versions": dict(versions), "env": sorted(backend.env)}
    yield InterpreterFinding(
        "interpreter", not old, f"{packages} in {python}{about}", installed.mending_hint(kind), facts
    )
    yield from installation(python, backend.env, WANTED[kind], installed.mending_hint(kind))


if __name__ == "__main__":
    main()
