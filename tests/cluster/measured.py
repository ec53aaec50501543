"""The table of faults, with times: `make cluster-faults` writes it to docs/lab/cluster-faults.md."""

import os
from dataclasses import dataclass, field
from pathlib import Path

_BEGIN, _END = "<!-- table: made by `make cluster-faults` -->\n", "<!-- end of the table -->\n"
_HEAD = ["| fault | the pool knows after | nothing is left after, or what else was seen |", "|---|---|---|"]
_Cell = float | str


@dataclass
class Measured:
    """What was seen of each fault, once for each time that it was made.

    That is: after how many seconds the pool knew, after how many nothing was left on any node, or words
    instead; and what is to be said of that.
    """

    seen: dict[str, list[tuple[_Cell, _Cell, str]]] = field(default_factory=dict)

    def add(self, fault: str, told: _Cell, gone: _Cell, but: str = "") -> None:
        """Note what was seen, and put it into the page that LORAD_FAULTS_PAGE names, if it does.

        The page is written each time, since an hour's work should not be lost with its last minute. Rows of
        other faults stay as they are.
        """
        self.seen.setdefault(fault, []).append((told, gone, but))
        if not (name := os.environ.get("LORAD_FAULTS_PAGE")):
            return
        page = Path(name)
        before, _, rest = page.read_text().partition(_BEGIN)
        table, _, after = rest.partition(_END)
        rows = {line.split(" | ")[0][2:]: line for line in table.strip().splitlines()[2:]}
        known, left, said = zip(*self.seen[fault], strict=True)
        rows[fault] = f"| {fault} | {_cell(known)} | {_cell(left)}{said[-1]} |"
        text = "\n".join([*_HEAD, *rows.values()])
        page.write_text(f"{before}{_BEGIN}\n{text}\n\n{_END}{after}")


def _cell(values: tuple[_Cell, ...]) -> str:
    words = [value if isinstance(value, str) else f"{value:.1f} s" for value in values]
    return ", ".join(dict.fromkeys(words) if isinstance(values[0], str) else words)
