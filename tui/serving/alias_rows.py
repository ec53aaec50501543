"""Rows of aliases: what they serve, who asks for them, and how quick the answers are."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.text import Text

from lorad.client.client import Client
from lorad.errors import LoradError
from lorad.records.versions import AliasMove, ServedAlias
from lorad.text import age, coarse_age, number, one_line
from lorad.tui.feed import Changes
from lorad.tui.widgets.columns import TableColumn, Values

_NAMED = 24  # cells of a version's name
_AT_ONCE = 8  # rewards that are asked for in one reading
_MOST_REWARDS = 4096
COLUMNS = (
    TableColumn("alias", 12, 28, 0, rest=True, orders=True),
    TableColumn("serves", 6, _NAMED, 0, orders=True),
    TableColumn("step", 4, 8, 6, right=True, orders=True),
    TableColumn("reward", 6, 8, 5, right=True, orders=True),
    TableColumn("owner", 5, 12, 9, orders=True),
    TableColumn("attested", 8, 12, 7),
    TableColumn("loaded", 6, 6, 4),
    TableColumn("pool", 4, 16, 11, orders=True),
    TableColumn("req/s", 5, 7, 2, right=True, orders=True),
    TableColumn("open", 4, 5, 3, right=True, orders=True),
    TableColumn("tok/s", 5, 8, 2, right=True, orders=True),
    TableColumn("ttft", 5, 7, 10, right=True, orders=True),
    TableColumn("p50", 5, 7, 3, right=True, orders=True),
    TableColumn("p95", 5, 7, 1, right=True, orders=True),
    TableColumn("since", 5, 6, 8, right=True, orders=True),
)


class AliasData(NamedTuple):
    """The aliases, and what is known of the versions that they serve.

    Attributes:
        pools: A pool that has the version loaded, by version.
        rewards: The rewards by version.
        moves: The moves of `alias`, newest first.
        kept: The base of the alias's run is kept warm.
    """

    aliases: list[ServedAlias]
    pools: dict[str, str]
    rewards: dict[str, float | None]
    alias: str | None
    moves: list[AliasMove]
    kept: bool

    def of(self, alias: str | None) -> ServedAlias | None:
        return next((row for row in self.aliases if row.alias == alias), None)


@dataclass(eq=False)
class Reader:
    """Reads on the feed's thread; another thread sets `alias`, the alias whose moves are read."""

    alias: str | None = None
    _rewards: dict[str, float | None] = field(default_factory=dict)

    def read(self, client: Client, changes: Changes) -> AliasData | None:
        happened = {kind for kinds in changes.kinds.values() for kind in kinds}
        if not (changes.everything or changes.tick or happened & {"alias", "serving"}):
            return None
        aliases = client.aliases()
        alias = self.alias
        loaded = {version: pool.pool for pool in client.pools() for version in pool.loaded}
        # the rewards of the steps whose versions are served, a few at each reading
        missing = [row for row in aliases if version_of(row) not in self._rewards and row.step]
        if len(self._rewards) + _AT_ONCE > _MOST_REWARDS:
            self._rewards.clear()
        for served in missing[:_AT_ONCE]:
            reward = None
            with contextlib.suppress(LoradError):
                step = served.step or 0
                steps = client.steps(served.run, after=step - 1, limit=1)
                reward = steps[0].metrics.get("reward") if steps and steps[0].step == step else None
            self._rewards[version_of(served)] = reward
        row = next((row for row in aliases if row.alias == alias), None)
        moves = [] if row is None else client.alias_moves(row.alias)
        is_kept = False
        if row is not None:
            with contextlib.suppress(LoradError):  # the run was removed meanwhile
                is_kept = client.show(row.run).serving
        return AliasData(aliases, loaded, dict(self._rewards), alias, moves, is_kept)


def version_of(row: ServedAlias | AliasMove) -> str:
    return f"{row.run}@{row.version}"


def values(row: ServedAlias, data: AliasData) -> Values:
    """Return the values by column; None where unknown."""
    traffic = row.traffic
    version = version_of(row)
    return {
        "alias": row.alias,
        "serves": version,
        "step": row.step,
        "reward": data.rewards.get(version),
        "owner": row.owner,
        "attested": row.attested,
        "loaded": version in data.pools,
        "pool": data.pools.get(version),
        "req/s": traffic.requests_per_second if traffic else None,
        "open": traffic.in_flight if traffic else None,
        "tok/s": traffic.tokens_per_second if traffic else None,
        "ttft": traffic.ttft_p50 if traffic else None,
        "p50": traffic.p50 if traffic else None,
        "p95": traffic.p95 if traffic else None,
        "since": row.updated_at,
    }


def cells(row: ServedAlias, data: AliasData) -> dict[str, Text]:
    figures = values(row, data)
    traffic = row.traffic
    busy = bool(figures["open"])
    serves = Text(one_line(row.run))  # with the number seen, however long the name of the run is
    serves.truncate(max(_NAMED - len(f"@{row.version}"), 4), overflow="ellipsis")
    serves.append(f"@{row.version}")
    attested = one_line(row.attested or "not yet")
    colors = {"passed": "green", "failed": "bold red"}
    texts = {
        "alias": Text(one_line(row.alias), style="bold"),
        "serves": serves,
        "step": Text("" if figures["step"] is None else str(figures["step"])),
        "reward": Text(number(data.rewards.get(version_of(row)))),
        "attested": Text(attested, style=colors.get(attested, "yellow")),
        "loaded": Text("● yes", style="green") if figures["loaded"] else Text("○ no", style="dim"),
        "req/s": _rate(traffic.requests_per_second if traffic else None, 2),
        "open": Text("-" if figures["open"] is None else str(figures["open"]), "bold" if busy else "dim"),
        "tok/s": _rate(traffic.tokens_per_second if traffic else None, 0),
        "since": Text(coarse_age(row.updated_at)),
    }
    times = (traffic.ttft_p50, traffic.p50, traffic.p95) if traffic else (None, None, None)
    texts |= {key: Text(milliseconds(time)) for key, time in zip(("ttft", "p50", "p95"), times, strict=True)}
    return {
        column.key: texts.get(column.key) or Text(one_line(str(figures[column.key] or "")))
        for column in COLUMNS
    }


def _rate(value: float | None, digits: int) -> Text:
    return Text("-" if value is None else f"{value:.{digits}f}", style="" if value else "dim")


def milliseconds(seconds: float | None) -> str:
    """Format seconds as short as a cell needs: 840ms, 3.39s, 12.5s."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}ms"
    return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"


def title(data: AliasData) -> Text:
    traffic = [row.traffic for row in data.aliases if row.traffic]
    count = f"Serving  {len(data.aliases)} alias{'es' * (len(data.aliases) != 1)}"
    if not traffic:
        return Text(count + (" · no gateway is up" if data.aliases else ""))
    requests = sum(figures.requests_per_second for figures in traffic)
    open_ = sum(figures.in_flight for figures in traffic)
    tokens = sum(figures.tokens_per_second for figures in traffic)
    return Text(f"{count} · {requests:.2f} req/s · {open_} open · {tokens:.0f} tok/s")


def details(row: ServedAlias, data: AliasData) -> Text:
    """Return a line on what is served, since when and by whom, and a line on its traffic."""
    parts = [f"{row.alias} → {version_of(row)}", f"attested: {row.attested or 'not yet'}"]
    parts += [f"by {row.by} {age(row.updated_at)} ago", f"sha256 {row.sha256[:12]}"]
    parts += ["base kept warm"] * data.kept
    below = "No gateway is up, so nothing is counted."
    if (traffic := row.traffic) is not None:
        counts = f"{traffic.requests} requests, {traffic.failed} failed, {traffic.tokens} tokens"
        first = f"{milliseconds(traffic.ttft_p50)}/{milliseconds(traffic.ttft_p95)}"
        whole = f"{milliseconds(traffic.p50)}/{milliseconds(traffic.p95)}"
        below = f"{counts} · p50/p95: first token {first}, answer {whole}"
    return Text.assemble(one_line(" · ".join(parts)), "\n", (one_line(below), "dim"))


def moves_text(moves: Iterable[AliasMove]) -> Text:
    """Write a line for each move, newest first."""
    lines = [
        Text.assemble(
            (f"{age(move.at):>7} ago  ", "dim"),
            "(removed)" if move.version is None else one_line(version_of(move)),
            (f"  by {one_line(move.by)}", "dim"),
        )
        for move in moves
    ]
    return Text("\n").join(lines)
