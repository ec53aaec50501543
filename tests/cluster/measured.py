"""The table of faults, with times: `make cluster-faults` writes it to docs/cluster-faults.md."""

import os
from dataclasses import dataclass, field
from pathlib import Path

_BEGIN, _END = "<!-- table: made by `make cluster-faults` -->\n", "<!-- end of the table -->\n"


@dataclass
class Measured:
    """Rows of (fault, seconds until the pool knows, seconds until nothing is left on any node, what is)."""

    rows: list[tuple[str, float | None, float, str]] = field(default_factory=list)

    def add(self, fault: str, told: float | None, gone: float, but: str = "") -> None:
        self.rows.append((fault, told, gone, but))

    def write(self) -> None:
        """Put the rows into the page that LORAD_FAULTS_PAGE names, if it does."""
        if not (name := os.environ.get("LORAD_FAULTS_PAGE")):
            return
        page = Path(name)
        before, _, rest = page.read_text().partition(_BEGIN)
        table = ["| fault | the pool knows after | nothing is left after |", "|---|---|---|"]
        for fault, told, gone, but in self.rows:
            table.append(f"| {fault} | {_seconds(told)} | {_seconds(gone)}{but} |")
        page.write_text(before + _BEGIN + "\n" + "\n".join(table) + "\n\n" + _END + rest.partition(_END)[2])


def _seconds(value: float | None) -> str:
    return "it is the pool itself" if value is None else f"{value:.1f} s"
