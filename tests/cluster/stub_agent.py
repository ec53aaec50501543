"""Stands for an agent where only its grant is tested.

It says one line, lives as long as its stdin, and has a child in a session of its own.
"""

import json
import os
import subprocess
import sys

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
start = json.loads(sys.stdin.readline())
if "--fail" in arguments:
    sys.exit(f"lorad: {arguments['--fail']}")
watch = "import os, sys; sys.stdin.read()"  # of a pipe of the agent's, as guards do
child = subprocess.Popen(
    [sys.executable, "-c", watch, "stub-child"], stdin=subprocess.PIPE, start_new_session=True
)
with open("/proc/sys/kernel/random/boot_id") as file:
    boot_id = file.read().strip()
node = {
    "node": arguments["--name"],
    "ip": arguments["--address"],
    "port": 1,
    "certificate": start["certificate"],
    "boot_id": boot_id,
    "directory": "/tmp/stub",
    "pid": os.getpid(),
    "lorad": "0",
    "uid": os.getuid(),
}
print(json.dumps({**node, "environment": dict(os.environ), "argv": sys.argv, "start": start}), flush=True)
sys.stdin.read()
