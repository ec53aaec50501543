"""Structs are learnt before there are threads.

msgspec works out the fields of a Struct when one is decoded for the first time, and meanwhile runs Python
code: two threads that are first at the same moment end the process by SIGSEGV (seen with msgspec 0.22: a
daemon that asked two pools at once how they are).
"""

import msgspec


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
