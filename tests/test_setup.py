"""`.ci/setup` installs by uv, from where pip's settings say."""

import os
import subprocess
import sys
from pathlib import Path

from tests.kit.world import REPOSITORY

PIP_CONF = """
[global]
index-url = https://one/simple
extra-index-url = https://two/simple
    https://three/simple
timeout = 9
[install]
find-links = /wheels /more
"""


def sources(directory: Path, **more: str) -> list[str]:
    """Return what is printed of a pip.conf, in order of names."""
    (directory / "pip.conf").write_text(PIP_CONF)
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "SSL_"))}
    done = subprocess.run(
        [sys.executable, REPOSITORY / ".ci/uv-sources"],
        env=mine | {"PIP_CONFIG_FILE": str(directory / "pip.conf")} | more,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    shell = ["sh", "-c", f"export {done.stdout}; env"]
    lines = subprocess.run(shell, env={}, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(line for line in lines if line.startswith(("UV_", "SSL_")))


def test_uv_installs_from_where_pip_would(tmp_path: Path) -> None:
    assert sources(tmp_path, PIP_CERT="/ca.crt") == [
        "SSL_CERT_FILE=/ca.crt",
        "UV_DEFAULT_INDEX=https://one/simple",
        "UV_EXTRA_INDEX_URL=https://two/simple https://three/simple",
        "UV_FIND_LINKS=/wheels,/more",
        "UV_INDEX_STRATEGY=unsafe-best-match",
        "UV_LINK_MODE=copy",
        "UV_SYSTEM_CERTS=true",
    ]


def test_environment_comes_before_files(tmp_path: Path) -> None:
    named = {"PIP_INDEX_URL": "https://four/simple", "UV_FIND_LINKS": "/mine", "UV_LINK_MODE": "hardlink"}
    lines = sources(tmp_path, **named)
    assert {"UV_DEFAULT_INDEX=https://four/simple", "UV_FIND_LINKS=/mine", "UV_LINK_MODE=hardlink"} <= {
        *lines
    }
