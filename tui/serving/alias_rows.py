"""Rows of aliases: what they serve, who asks for them, and how quick the answers are."""

from collections.abc import Iterable
from typing import NamedTuple

from rich.text import Text

from lorad.client.client import Client
from lorad.errors import LoradError
from lorad.protocol.traffic import Figures
from lorad.records.versions import AliasMove, ServedAlias
from lorad.text import age, coarse_age, number, one_line
from lorad.tui.feed import Changes
from lorad.tui.widgets.columns import Column, Values

_NAMED = 24  # cells of a version's name
_AT_ONCE = 8  # rewards that are asked for in one reading
_MOST_REWARDS = 4096
COLUMNS = (
    Column("alias", 12, 28, 0, rest=True, orders=True),
    Column("serves", 6, _NAMED, 0, orders=True),
    Column("step", 4, 8, 6, right=True, orders=True),
    Column("reward", 6, 8, 5, right=True, orders=True),
    Column("owner", 5, 12, 9, orders=True),
    Column("attested", 8, 12, 7),
    Column("loaded", 6, 6, 4),
    Column("pool", 4, 16, 11, orders=True),
    Column("req/s", 5, 7, 2, right=True, orders=True),
    Column("open", 4, 5, 3, right=True, orders=True),
    Column("tok/s", 5, 8, 2, right=True, orders=True),
    Column("ttft", 5, 7, 10, right=True, orders=True),
    Column("p50", 5, 7, 3, right=True, orders=True),
    Column("p95", 5, 7, 1, right=True, orders=True),
    Column("since", 5, 6, 8, right=True, orders=True),
)


class Data(NamedTuple):
    """moves: of `alias`, newest first. rewards: by version. kept: whether its run's base is kept warm."""

    aliases: list[ServedAlias]
    pools: dict[str, str]  # version -> a pool that has it loaded
    rewards: dict[str, float | None]
    alias: str | None
    moves: list[AliasMove]
    kept: bool

    def of(self, alias: str | None) -> ServedAlias | None:
        return next((row for row in self.aliases if row.alias == alias), None)


class Reader:
    """Lives on the feed's thread, but for `alias`: the one whose moves are wanted."""

    def __init__(self) -> None:
        self.alias: str | None = None
        self._rewards: dict[str, float | None] = {}

    def read(self, client: Client, changes: Changes) -> Data | None:
        happened = {kind for kinds in changes.kinds.values() for kind in kinds}
        if not (changes.everything or changes.tick or happened & {"alias", "serving"}):
            return None
        aliases, alias = client.aliases(), self.alias
        loaded = {version: pool.pool for pool in client.pools() for version in pool.loaded}
        self._ask_rewards(client, aliases)
        row = next((row for row in aliases if row.alias == alias), None)
        moves = [] if row is None else client.alias_moves(row.alias)
        kept = row is not None and _is_kept(client, row.run)
        return Data(aliases, loaded, dict(self._rewards), alias, moves, kept)

    def _ask_rewards(self, client: Client, aliases: Iterable[ServedAlias]) -> None:
        """Ask for the rewards of the steps whose versions are served, a few at each reading."""
        missing = [row for row in aliases if version_of(row) not in self._rewards and row.step]
        if len(self._rewards) + _AT_ONCE > _MOST_REWARDS:
            self._rewards.clear()
        for row in missing[:_AT_ONCE]:
            self._rewards[version_of(row)] = _reward_of(client, row.run, row.step or 0)


def _is_kept(client: Client, run: str) -> bool:
    """Whether the run's base is kept warm."""
    try:
        return client.show(run).serving
    except LoradError:  # it was removed meanwhile
        return False


def _reward_of(client: Client, run: str, step: int) -> float | None:
    try:
        found = client.steps(run, after=step - 1, limit=1)
    except LoradError:
        return None
    return found[0].metrics.get("reward") if found and found[0].step == step else None


def version_of(row: ServedAlias | AliasMove) -> str:
    return f"{row.run}@{row.version}"


def values(row: ServedAlias, data: Data) -> Values:
    """Return the values by column; None where unknown."""
    traffic, version = row.traffic, version_of(row)
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


def cells(row: ServedAlias, data: Data) -> dict[str, Text]:
    found, traffic = values(row, data), row.traffic
    busy = bool(found["open"])
    texts = {
        "alias": Text(one_line(row.alias), style="bold"),
        "serves": _short(row),
        "step": Text("" if found["step"] is None else str(found["step"])),
        "reward": Text(number(data.rewards.get(version_of(row)))),
        "attested": _attested(row.attested),
        "loaded": Text("● yes", style="green") if found["loaded"] else Text("○ no", style="dim"),
        "req/s": _rate(traffic.requests_per_second if traffic else None, 2),
        "open": Text("-" if found["open"] is None else str(found["open"]), style="bold" if busy else "dim"),
        "tok/s": _rate(traffic.tokens_per_second if traffic else None, 0),
        "since": Text(coarse_age(row.updated_at)),
    }
    times = (traffic.ttft_p50, traffic.p50, traffic.p95) if traffic else (None, None, None)
    texts |= {key: Text(milliseconds(time)) for key, time in zip(("ttft", "p50", "p95"), times, strict=True)}
    return {
        column.key: texts.get(column.key) or Text(one_line(str(found[column.key] or "")))
        for column in COLUMNS
    }


def _short(row: ServedAlias) -> Text:
    """A version with its number, however long its run's name is."""
    number = f"@{row.version}"
    run = Text(one_line(row.run))
    run.truncate(max(_NAMED - len(number), 4), overflow="ellipsis")
    return run.append(number)


def _rate(value: float | None, digits: int) -> Text:
    return Text("-" if value is None else f"{value:.{digits}f}", style="" if value else "dim")


def milliseconds(seconds: float | None) -> str:
    """Format seconds as short as a cell needs: 840ms, 3.39s, 12.5s."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}ms"
    return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"


def _attested(verdict: str | None) -> Text:
    text = one_line(verdict or "not yet")
    return Text(text, style="green" if text == "passed" else "bold red" if text == "failed" else "yellow")


def title(data: Data) -> Text:
    known = [row.traffic for row in data.aliases if row.traffic]
    count = f"Serving  {len(data.aliases)} alias{'es' * (len(data.aliases) != 1)}"
    if not known:
        return Text(count + (" · no gateway is up" if data.aliases else ""))
    requests, open_ = sum(one.requests_per_second for one in known), sum(one.in_flight for one in known)
    tokens = sum(one.tokens_per_second for one in known)
    return Text(f"{count} · {requests:.2f} req/s · {open_} open · {tokens:.0f} tok/s")


def details(row: ServedAlias, data: Data) -> Text:
    """A line of who, and one of traffic."""
    parts = [f"{row.alias} → {version_of(row)}", f"attested: {row.attested or 'not yet'}"]
    parts += [f"by {row.by} {age(row.updated_at)} ago", f"sha256 {row.sha256[:12]}"]
    parts += ["base kept warm"] * data.kept
    return Text.assemble(one_line(" · ".join(parts)), "\n", (one_line(_traffic_told(row.traffic)), "dim"))


def _traffic_told(traffic: Figures | None) -> str:
    if traffic is None:
        return "No gateway is up, so nothing is counted."
    counts = f"{traffic.requests} requests, {traffic.failed} failed, {traffic.tokens} tokens"
    first = f"{milliseconds(traffic.ttft_p50)}/{milliseconds(traffic.ttft_p95)}"
    return (
        f"{counts} · p50/p95: first token {first}, answer "
        f"{milliseconds(traffic.p50)}/{milliseconds(traffic.p95)}"
    )


def moves_text(moves: Iterable[AliasMove]) -> Text:
    """Newest first."""
    lines = [
        Text.assemble(
            (f"{age(move.at):>7} ago  ", "dim"),
            "(removed)" if move.version is None else one_line(version_of(move)),
            (f"  by {one_line(move.by)}", "dim"),
        )
        for move in moves
    ]
    return Text("\n").join(lines)
