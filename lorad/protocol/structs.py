"""Structs are learnt before there are threads.

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
    """Build the decoders of all structs of lorad that are defined so far, and count them.

    Call it at the start of a process, when its modules are imported.
    """
    count = 0
    for struct in base.__subclasses__():
        if struct.__module__.partition(".")[0] == "lorad":
            msgspec.json.Decoder(struct)
            count += 1 + learn_structs(struct)
    return count


def learnt(kind: type[T]) -> type[T]:
    """Build the decoder of a type, while no other thread builds one here, and return the type.

    It is for what is imported by other programs and may be used in their threads, as the client is: at their
    start nobody calls `learn_structs`.
    """
    with _LEARNING:
        msgspec.json.Decoder(kind)
    return kind
