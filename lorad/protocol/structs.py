"""Build the decoders of Structs before there are threads.

msgspec works out the fields of a Struct when one is decoded for the first time, and meanwhile runs Python
code: two threads that are first at the same moment end the process by SIGSEGV (seen with msgspec 0.22: a
daemon that asked two pools at once how they are).
"""

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")
_LEARNING = threading.Lock()


def learn_structs(base: type[msgspec.Struct] = msgspec.Struct) -> int:
    """Build the decoders of all structs that lorad has defined by the start of a process, and count them."""
    count = 0
    for struct in base.__subclasses__():
        if struct.__module__.partition(".")[0] == "lorad":
            msgspec.json.Decoder(struct)
            count += 1 + learn_structs(struct)
    return count


def with_decoder(kind: type[T]) -> type[T]:
    """Build the decoder of a type, while no other thread builds one here, and return the type.

    The client needs it: in the threads of other programs, nobody calls `learn_structs` at the start.
    """
    with _LEARNING:
        msgspec.json.Decoder(kind)
    return kind
