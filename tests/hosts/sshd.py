"""A real sshd on a port of loopback, with keys of its own."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def real_sshd(
    user: str, *, key: str = "", forwards: bool = True, around: Sequence[str] = ()
) -> Iterator[str]:
    """Start sshd, and give the words that reach it as the host `box`; it ends with the block.

    key: what stands before the key in the file of those that may log in. forwards: whether it forwards
    sockets. around: what sshd is started by.
    """
    root = Path(tempfile.mkdtemp(prefix="lr-sshd-"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", root / name], check=True)
    root.chmod(0o711)  # whoever logs in reads which keys may
    authorized = root / "user.pub"
    authorized.write_text(f"{key} {authorized.read_text()}".lstrip())
    settings = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": root / "host", "PidFile": root / "pid",
        "AuthorizedKeysFile": authorized, "StrictModes": "no", "UsePAM": "no",
        "PermitRootLogin": "prohibit-password", "AllowStreamLocalForwarding": "yes" if forwards else "no",
    }  # fmt: skip
    (root / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    ours = {
        "HostName": "127.0.0.1", "Port": port, "User": user, "IdentityFile": root / "user",
        "IdentitiesOnly": "yes", "UserKnownHostsFile": root / "known", "StrictHostKeyChecking": "accept-new",
    }  # fmt: skip
    lines = "".join(f"  {key} {value}\n" for key, value in ours.items())
    (root / "ssh_config").write_text(f"Host box\n{lines}")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with (root / "log").open("wb") as log:
        sshd = subprocess.Popen(
            [*around, "/usr/sbin/sshd", "-D", "-e", "-f", root / "sshd_config"], stderr=log
        )
    try:
        while not _listens(port):
            assert sshd.poll() is None, (root / "log").read_text()
            time.sleep(0.01)
        yield f"{shutil.which('ssh')} -F {root / 'ssh_config'}"
    finally:
        sshd.terminate()
        sshd.wait()
        shutil.rmtree(root, ignore_errors=True)


def _listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0
