"""`lorad tui --serve` in a real browser: a headless Chromium, by its keys and its mouse."""

import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.chromium import BROWSER, Tab, chromium
from tests.kit.served import served
from tests.kit.world import World, world

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium on this machine: `.ci/setup-browser` installs Debian's"
    ),
]


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as one:
        one.run("first", "trainer.steps=2")
        one.run("second", "trainer.steps=2")
        yield one


async def test_browser_draws_dashboard_for_keys_and_mouse(made: World) -> None:
    """For one that knows the token; a stranger sees the refusal."""
    with served(made) as server:
        async with chromium() as tab:
            await is_refused(await tab(server.root + "/"), server.root + "/")
            page = await tab(server.url)
            # keys are told once the page has the focus, which needs no click
            shown = ("first", "second", "Quit")
            lines = await page.until(
                lambda text: all(word in text for word in shown), "both runs, and the keys"
            )
            await opens_help(page)
            await opens_a_run(page, lines)
            picture = await page.picture()
            keep(picture)
            assert colours(picture) > 10
            assert {url for url in page.asked if not url.startswith(server.root)} == set()
            assert page.complaints == []


async def is_refused(stranger: Tab, url: str) -> None:
    await stranger.said("401: lorad shows nothing here")
    assert stranger.statuses[url] == 401
    assert await stranger.value("document.querySelectorAll('script, canvas').length") == 0


async def opens_help(page: Tab) -> None:
    await page.press("?")
    await page.until(lambda text: "board.filter" in text, "the help screen")
    await page.press("Escape")
    await page.until(lambda text: "board.filter" not in text, "the help screen is gone")


async def opens_a_run(page: Tab, lines: list[str]) -> None:
    """The second of the table, whichever that is, by its row and enter;
    then another tab of it by its label.
    """
    row = max(y for y, line in enumerate(lines) if line.split()[:1] in (["first"], ["second"]))
    name = lines[row].split()[0]
    await page.click(lines[row].index(name) + 1, row)
    await page.until(lambda text: f"lorad show {name}" in text, "the command for the row that was clicked")
    await page.press("Enter")
    lines = await page.until(lambda text: "versions" in text and name in text, "the run's screen")
    row = next(y for y, line in enumerate(lines) if "versions" in line)
    await page.click(lines[row].index("versions") + 1, row)
    await page.until(
        lambda text: f"lorad adapters {name}" in text and "passed" in text, "its versions, attested"
    )


def keep(picture: bytes) -> None:
    """Save the picture to look at, where PICTURES names a directory."""
    if where := os.environ.get("PICTURES"):
        Path(where, "browser.png").write_bytes(picture)


def colours(png: bytes) -> int:
    """How many different values the scanlines of a PNG hold: one that shows nothing has few."""
    at, data = 8, b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    assert png.startswith(b"\x89PNG") and data
    return len(Counter(zlib.decompress(data)))
