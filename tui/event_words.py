"""Describes each event in one line."""

from collections.abc import Callable
from typing import Any

import msgspec

from lorad.protocol.evals import Expected
from lorad.records.runs import Event
from lorad.text import moment, number, one_line, size

_Data = dict[str, Any]  # each kind of event has its own, and kinds come and go with the daemon's version


def event_text(event: Event) -> str:
    """Describe an event without its time and run; an event of unknown kind by its data."""
    kind = event.kind
    data = event.data
    try:
        words = _KINDS[kind](data) if kind in _KINDS else _plain(kind, data)
    except (KeyError, TypeError, ValueError):  # data of an older or newer daemon
        words = _plain(kind, data)
    return one_line(words)


def _plain(kind: str, data: _Data) -> str:
    return " ".join([kind, *(f"{key}={value}" for key, value in data.items() if value not in (None, "", 0))])


def _state(data: _Data) -> str:
    state = str(data["reason"] or data["state"] if data.get("reason") else data["state"]).replace("_", " ")
    detail = (
        f": {data['detail']}"
        if data.get("detail") and data.get("reason") not in ("completed", "stopped")
        else ""
    )
    return state + _by(data) + detail


def _by(data: _Data) -> str:
    return f" (by {data['by']})" if data.get("by") not in (None, "", "daemon") else ""


def _attempt(data: _Data) -> str:
    start = data.get("resumed_from")
    return f"attempt {data['attempt']} begins" + ("" if start is None else f", from step {start}")


def _alias(data: _Data) -> str:
    before = f", before {data['previous']}" if data.get("previous") else ""
    if data["version"] is None:
        return f"alias {data['alias']} is removed{before}{_by(data)}"
    return f"alias {data['alias']} serves @{data['version']}{before}{_by(data)}"


def _labels(data: _Data) -> str:
    note = f", note: {data['note']}" if data["note"] else ""
    return f"tags: {' '.join(data['tags']) or 'none'}{note}{_by(data)}"


def _serving(data: _Data) -> str:
    if data.get("stopped"):
        return f"its base may end when idle{_by(data)}"
    return str(data.get("waiting") or f"its base is up in {data['pool']}")


def _detail(data: _Data) -> str:
    return f": {data['detail']}" if data["detail"] else ""


def _reserved(data: _Data) -> str:
    until = f" until {moment(data['until'])}" if data.get("until") else ""
    return f"{data['device']} is reserved{until}{_by(data)}" + (f": {data['why']}" if data["why"] else "")


_KINDS: dict[str, Callable[[_Data], str]] = {
    "state": _state,
    "step": lambda data: f"step {data['step']}, reward {number((data.get('metrics') or {}).get('reward'))}",
    "version": lambda data: f"@{data['version']} is current, attestation {data.get('attested', 'unknown')}",
    "eval": lambda data: f"eval {number(data['score'])} of @{data['version']}",
    "checkpoint": lambda data: f"checkpoint of step {data['step']}, {size(data.get('bytes'))}",
    "attempt": _attempt,
    "labels": _labels,
    "edited": lambda data: f"edited: {' '.join(data['changed'])}{_by(data)}",
    "placed": lambda data: f"{data['ranks']} ranks on {', '.join(node['node'] for node in data['nodes'])}",
    "rewind": lambda data: f"rewound to step {data['to']}",
    "expect": lambda data: msgspec.convert(data, Expected).in_words,
    "warning": lambda data: f"warning: {data['message']}",
    "notify": lambda data: f"not notified of {data['event']}: {data['error']}",
    "end": lambda data: f"its driver ended: {data['reason']}",
    "moved": lambda data: f"the files of {data['runs']} runs were moved from {data['from']} to {data['to']}",
    "removed": lambda data: f"deleted{_by(data)}",
    "pin": lambda data: f"@{data['version']} is pinned{_by(data)}",
    "unpin": lambda data: f"@{data['version']} is not pinned any more{_by(data)}",
    "alias": _alias,
    "forked": lambda data: f"forked from {data['from']}{_by(data)}",
    "exported": lambda data: f"@{data['version']} is exported to {data['directory']}{_by(data)}",
    "evaluated": lambda data: f"@{data['version']} was evaluated on {data['data']}{_by(data)}",
    "serving": _serving,
    "reserved": _reserved,
    "grant_asked": lambda data: f"{data['pool']} asks the cluster for nodes{_detail(data)}",
    "granted": lambda data: f"{data['pool']} was granted {', '.join(data['nodes'])}",
    "grant_lost": lambda data: f"{data['pool']} does not have the nodes that it asked for{_detail(data)}",
    "node_lost": lambda data: f"node lost: {data['how']}",
    "released": lambda data: f"{data['device']} is not reserved any more{_by(data)}",
}
