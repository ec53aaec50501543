"""`lorad report` of a real run in a real browser, without a network: what is seen, and what does not run."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lorad.cli.commands.report.facts import RunFacts, read
from lorad.cli.commands.report.page import page
from tests.cli.report.kit import NASTY, a_sample
from tests.kit.chromium import BROWSER, Tab, chromium
from tests.kit.world import World, world

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium on this machine: `.ci/setup-browser` installs Debian's"
    ),
]
OUTSIDE = """
[...document.querySelectorAll("main, main :is(section, article, pre, dd, dt, li, p, h1, h2, h3, h4)")]
    .filter(one => !one.closest(".wide") && one.getClientRects().length
        && (one.scrollWidth > one.clientWidth + 1 || one.getBoundingClientRect().right > innerWidth + 1))
    .map(one => one.outerHTML.slice(0, 100))
"""
CURVES = """
[...document.querySelectorAll("figure")].map(figure => {
    const {width, height} = figure.querySelector("svg svg polyline").getBoundingClientRect();
    return width > 100 && height >= 0 && getComputedStyle(figure.querySelector("polyline")).stroke != "none";
})
"""
INJECTED = """
(() => {
    const script = document.createElement("script"), style = document.createElement("style");
    const picture = new Image();
    script.textContent = "window.owned = 1"; picture.src = "file:///etc/hostname.png";
    style.textContent = "body {display: none}"; document.body.append(script, picture, style);
    return getComputedStyle(document.body).display;
})()
"""


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as one:
        one.run("first", "eval.every=3", "eval.problems=16")
        yield one


async def shown(tab: Tab, file: Path, width: int, scheme: str) -> None:
    """Have a page shown in a window of this width, without a network."""
    await tab.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0,
                   uploadThroughput=0)  # fmt: skip
    await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    await tab.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )
    await tab.call("Page.navigate", url=file.as_uri())
    await tab.said("Written by lorad")
    if where := os.environ.get("PICTURES"):
        keep(await tab.picture(), Path(where, f"report-{width}-{scheme}.png"))


def keep(picture: bytes, file: Path) -> None:
    """Save a picture to look at."""
    file.write_bytes(picture)


async def test_a_page_is_whole_without_a_network(made: World, tmp_path: Path) -> None:
    file = tmp_path / "first.html"
    made.lorad("report", "first", "-o", file)
    async with chromium() as open_tab:
        tab = await open_tab("about:blank")
        grounds = set()
        for scheme, width in (("light", 1200), ("dark", 400)):
            await shown(tab, file, width, scheme)
            assert await tab.value("document.documentElement.scrollWidth") <= width
            assert await tab.value(OUTSIDE) == []
            curves = await tab.value(CURVES)
            assert len(curves) >= 8 and all(curves)
            grounds.add(await tab.value("getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2
        assert {url for url in tab.asked if url != "about:blank"} == {file.as_uri()} and tab.complaints == []


async def test_what_a_model_wrote_does_nothing(made: World, tmp_path: Path) -> None:
    (facts,) = read(made.client, ["first"])
    file = tmp_path / "hostile.html"
    file.write_text(page([hostile(facts)], 0.0))
    async with chromium() as open_tab:
        tab = await open_tab("about:blank")
        await shown(tab, file, 400, "light")
        assert await tab.value("document.documentElement.scrollWidth") <= 400
        assert await tab.value(OUTSIDE) == []
        words = await tab.value("[...document.querySelectorAll('pre')].map(one => one.innerText).join()")
        assert all(text in words for text in (NASTY["script"], NASTY["handler"], NASTY["quotes"]))
        assert await tab.value("[window.owned, document.title]") == [None, "first: lorad"]
        assert {url for url in tab.asked if url != "about:blank"} == {file.as_uri()} and tab.complaints == []


async def test_the_policy_lets_nothing_in(made: World, tmp_path: Path) -> None:
    file = tmp_path / "first.html"
    made.lorad("report", "first", "-o", file)
    async with chromium() as open_tab:
        tab = await open_tab("about:blank")
        await shown(tab, file, 1200, "light")
        assert await tab.value(INJECTED) == "block"
        assert await tab.value("window.owned") is None
        refused = [words for words in tab.complaints if "Content Security Policy" in words]
        assert len(refused) == 3 and "file:///etc/hostname.png" not in tab.statuses


def test_samples_that_are_gone_or_changed_are_named(made: World) -> None:
    samples = made.home.run("first").root / "samples"
    first, *_, last = sorted(samples.iterdir())
    first.unlink()
    last.write_bytes(last.read_bytes().replace(b"stop", b"pots"))
    (facts,) = read(made.client, ["first"])
    assert facts.notes == [
        "The samples of step 1 are not kept.",
        "The samples of step 6 are not those that were written: other bytes.",
    ]
    assert "The samples of step 1 are not kept." in page([facts], 0.0)


def hostile(facts: RunFacts) -> RunFacts:
    samples = [(text, a_sample(text)) for text in NASTY.values()]
    return replace(facts, samples=samples, notes=[*NASTY.values()])
