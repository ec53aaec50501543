"""The door's table of protobuf messages against the descriptor of the client's: `python client_messages.py`,
with lorad's tree in PYTHONPATH.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from tinker.proto import tinker_public_pb2

UNREAD = ("ImageChunk", "DmelChunk", "ProvenanceSpan")
MESSAGES = Path(__file__).parents[3] / "lorad" / "tinker" / "door" / "messages.py"


def table() -> ModuleType:
    """Load the one file, as lorad itself needs more than the client's environment has."""
    spec = importlib.util.spec_from_file_location("messages", MESSAGES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fields(message: Any) -> dict[str, tuple[Any, ...]]:
    """Return what the wire depends on, by the name of each field."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type.name if field.message_type else "",
            field.containing_oneof.name if field.containing_oneof else "",
        )
        for field in message.fields
    }


def main() -> None:
    module = table()
    theirs = tinker_public_pb2.DESCRIPTOR.message_types_by_name
    for name in module.MESSAGES:
        assert name in theirs, f"the client has no {name}"
        mine, known = fields(module.M[name].DESCRIPTOR), fields(theirs[name])
        if name in UNREAD:
            known = {field: about for field, about in known.items() if field in mine}
        assert mine == known, (name, mine, known)
    used = {"ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse"}
    assert used <= {*module.MESSAGES}
    print("all messages are known", flush=True)


if __name__ == "__main__":
    main()
