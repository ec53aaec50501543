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
from lorad.tui.widgets.columns import Fact, TableColumn, TableRow, row_of

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
        pools: A pool that has the version loaded, by version; so are rewards.
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
class AliasReader:
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
        data = AliasData(aliases, loaded, dict(self._rewards), alias, [], False)
        if (row := data.of(alias)) is not None:
            data = data._replace(moves=client.alias_moves(row.alias))
            with contextlib.suppress(LoradError):  # the run was removed meanwhile
                data = data._replace(kept=client.show(row.run).serving)
        return data


def version_of(row: ServedAlias | AliasMove) -> str:
    return f"{row.run}@{row.version}"


def alias_row(row: ServedAlias, data: AliasData) -> TableRow:
    version = version_of(row)
    reward = data.rewards.get(version)
    pool = data.pools.get(version)
    traffic = row.traffic
    serves = Text(one_line(row.run))  # with the number seen, however long the name of the run is
    serves.truncate(max(_NAMED - len(f"@{row.version}"), 4), overflow="ellipsis")
    attested = row.attested or "not yet"
    facts: dict[str, Fact] = {
        "alias": row.alias,
        "serves": (f"{serves.plain}@{row.version}", version),
        "step": ("", None) if row.step is None else row.step,
        "reward": (number(reward), reward),
        "owner": row.owner,
        "attested": attested,
        "loaded": "○ no" if pool is None else "● yes",
        "pool": ("", None) if pool is None else pool,
        "since": (coarse_age(row.updated_at), row.updated_at),
        **dict.fromkeys(("req/s", "open", "tok/s", "ttft", "p50", "p95"), ("-", None)),
    }
    if traffic is not None:
        times = {"ttft": traffic.ttft_p50, "p50": traffic.p50, "p95": traffic.p95}
        facts |= {
            "req/s": (f"{traffic.requests_per_second:.2f}", traffic.requests_per_second),
            "open": traffic.in_flight,
            "tok/s": (f"{traffic.tokens_per_second:.0f}", traffic.tokens_per_second),
            **{key: (milliseconds(time), time) for key, time in times.items()},
        }
    styles = {
        "alias": "bold",
        "attested": {"passed": "green", "failed": "bold red"}.get(attested, "yellow"),
        "loaded": "dim" if pool is None else "green",
        "req/s": "" if traffic and traffic.requests_per_second else "dim",
        "open": "bold" if traffic and traffic.in_flight else "dim",
        "tok/s": "" if traffic and traffic.tokens_per_second else "dim",
    }
    table_row = row_of(facts)
    for key, style in styles.items():
        table_row.cells[key].style = style
    return table_row


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
