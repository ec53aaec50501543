"""`python -m tests.kit.frozen.pictures [NAME …]`: pictures of README and docs, by the TUI on the frozen
world, as SVG and as PNG.
"""

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.kit.frozen.png import png
from tests.kit.frozen.walks import WALKS, Walk, app_of, tab
from tests.kit.frozen.world import frozen_world, standing_still

PICTURES = Path(__file__).parents[3] / "examples" / "pictures"
SIZE = (140, 42)
LEARNING, SMALL = "tui-learning", (110, 32)
SHARES = (0.05, 0.12, 0.22, 0.35, 0.5, 0.65, 0.82, 1.0)
SECONDS = 0.9  # for each of them; the last one stays for three times that
SHOWN: dict[str, Walk] = {
    "tui-runs": WALKS["dashboard"],
    "tui-run": WALKS["curves"],
    "tui-samples": WALKS["samples"],
    "tui-transcript": WALKS["transcript"],
    "tui-versions": WALKS["versions"],
    "tui-serving": WALKS["chat"],
    "tui-new-run": WALKS["new_run"],
    "tui-command": WALKS["command"],
}


def taken(walk: Walk, size: tuple[int, int], share: float = 1.0, *, also: Path | None = None) -> str:
    """A picture of the end of a way. also: where the same is written as PNG."""

    async def take() -> str:
        app = app_of(client)
        async with app.run_test(size=size) as user:
            await walk(user)
            if also is not None:
                png(app.screen, also)
            return app.export_screenshot(title="lorad tui", simplify=True)

    with tempfile.TemporaryDirectory(prefix="lr-") as home, frozen_world(Path(home), share) as client:
        os.environ["XDG_STATE_HOME"] = f"{home}/state"  # what somebody chose to see is not in them
        return asyncio.run(take())


def moving(frames: Sequence[str]) -> str:
    """One picture that shows frames one after the other, for ever; without animations, the last."""
    number, seconds = len(frames), (len(frames) + 2) * SECONDS
    head = re.search(r'viewBox="([^"]*)"', frames[0])
    assert head
    style = [
        f"@keyframes {name} "
        f"{{ 0% {{ opacity: 1 }} {100 * stays * SECONDS / seconds:.3f}%, to {{ opacity: 0 }} }}"
        for name, stays in (("show", 1), ("stay", 3))
    ]
    for at in range(number):
        name, begins = ("show" if at < number - 1 else "stay"), at * SECONDS - seconds
        shown = (
            f"opacity: {int(at == number - 1)}; animation: {name} {seconds:.2f}s step-end {begins:.2f}s "
            "infinite"
        )
        style.append(f".frame-{at} {{ {shown} }}")
    parts = [f'<g class="frame-{at}">{own(frame, at)}</g>' for at, frame in enumerate(frames)]
    lines = [
        f'<svg viewBox="{head[1]}" xmlns="http://www.w3.org/2000/svg">',
        "<style>",
        *style,
        "</style>",
        *parts,
    ]
    return "\n".join([*lines, "</svg>", ""])


def own(frame: str, number: int) -> str:
    """Rename the classes of a frame so that no other frame has them."""
    return re.sub(r"\bt-(?=[a-z])", f"t{number}-", frame)


def learning(last: Path) -> str:
    """last: where its last frame is written as PNG."""
    walk = tab(1, last=("step ",))
    return moving([taken(walk, SMALL, share, also=last if share == SHARES[-1] else None) for share in SHARES])


def main(*names: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    with standing_still():
        for name in names or (*SHOWN, LEARNING):
            still = PICTURES / f"{name}.png"
            picture = learning(still) if name == LEARNING else taken(SHOWN[name], SIZE, also=still)
            (PICTURES / f"{name}.svg").write_text(picture)
            sizes = f"{len(picture.encode()) / 1024:.0f} KiB, PNG {still.stat().st_size / 1024:.0f} KiB"
            print(f"examples/pictures/{name}.svg: {sizes}")


if __name__ == "__main__":
    main(*sys.argv[1:])
