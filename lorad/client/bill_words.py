"""The figures of the bill as people read them, the same in the CLI and in the dashboard."""

from lorad.client.columns import amount
from lorad.records.bill import BillLine
from lorad.text import duration, size

_NOBODY = "(nobody)"


def bill_words(by: str, line: BillLine, currency: str) -> dict[str, str]:
    """Return the text of each column, in the order of the table; "" where there is nothing.

    by: what a line of the bill is about: user, run, sweep, alias, pool or day. The column `what` names it.
    """
    name = line.key or _NOBODY
    if line.key == "-":
        name = "(no sweep)" if by == "sweep" else "(training)"
    elif by == "alias" and line.key.endswith("@"):  # versions that were asked for without an alias
        name = f"{line.key}N"
    counts = (line.sampled, line.trained, line.served)
    sampled, trained, served = (f"{tokens:,}" if tokens else "" for tokens in counts)
    return {
        "what": name,
        "owner": line.owner,
        "held": duration(line.held),
        "busy": duration(line.busy),
        "wasted": duration(line.wasted) if line.wasted >= 1 else "",
        "sampled": sampled,
        "trained": trained,
        "served": served,
        "cached": f"{line.cached / line.prompts:.0%}" if line.prompts else "",
        "energy": "" if line.joules is None else f"{line.joules / 3.6e6:.3g} kWh",
        "memory": size(line.memory or None),
        "disk": size(line.disk),
        "cost": "" if line.cost is None else f"{amount(line.cost)} {currency}".rstrip(),
    }
