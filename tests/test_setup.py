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
"""


def sources(directory: Path, **more: str) -> list[str]:
    """Return what is printed of a pip.conf, as a shell reads it."""
    (directory / "pip.conf").write_text(PIP_CONF)
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "SSL_"))}
    done = subprocess.run(
        [sys.executable, REPOSITORY / ".ci/uv-sources"],
        env=mine | {"PIP_CONFIG_FILE": str(directory / "pip.conf")} | more,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    shell = ["sh", "-c", f"export {done.stdout.strip()}; env"]
    return subprocess.run(shell, env={}, capture_output=True, text=True, check=True).stdout.splitlines()


def test_uv_installs_from_where_pip_would(tmp_path: Path) -> None:
    assert {
        "SSL_CERT_FILE=/ca.crt",
        "UV_DEFAULT_INDEX=https://one/simple",
        "UV_EXTRA_INDEX_URL=https://two/simple https://three/simple",
        "UV_FIND_LINKS=/wheels,/more",
        "UV_INDEX_STRATEGY=unsafe-best-match",
        "UV_LINK_MODE=copy",
        "UV_SYSTEM_CERTS=true",
    } <= {*sources(tmp_path, PIP_CERT="/ca.crt", PIP_FIND_LINKS="/wheels /more")}


def test_environment_comes_before_files(tmp_path: Path) -> None:
    named = {"PIP_INDEX_URL": "https://four/simple", "UV_LINK_MODE": "hardlink"}
    lines = {*sources(tmp_path, **named)}
    assert {"UV_DEFAULT_INDEX=https://four/simple", "UV_LINK_MODE=hardlink"} <= lines
