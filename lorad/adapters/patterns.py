"""PEFT's `rank_pattern` and `alpha_pattern`: values of the modules whose names end as a key says.

A key is a regular expression there, and the first that matches a name's end (after a dot) counts. Here a key
is read part by part, so that no key can take long: each part is a word, `\\d+` or `\\w+`, with `.*\\.` or `^`
before the first.
"""

import re
from collections.abc import Mapping
from typing import Any

from lorad.adapters.adapter import AdapterConfig

_GATE_UP = r"experts\.gate_up_proj"
_DOWN = r"experts\.down_proj"
"""Parameters that hold gate and up, or down, of all experts of a layer since transformers 5."""
_EACH = r"experts\.\d+\.\w+"
_PARTS = re.compile(r"\\?\.")
_PART = re.compile(r"[A-Za-z0-9_-]+")
_WILD = {r"\d+": re.compile(r"\d+"), r"\w+": re.compile(r"\w+")}
_MOST_WILD = 64  # keys with wildcards


class Pattern:
    """A table of values by patterns of names. Raises ValueError, which names the key, for one not read."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._exact: dict[str, int] = {}
        self._wild: list[tuple[int, list[str]]] = []
        self._whole: dict[str, int] = {}
        self.keys = list(table)
        self.values = list(table.values())
        self.used = set[str]()
        for number, key in enumerate(table):
            parts = _PARTS.split(key.removeprefix(r".*\.").removeprefix("^").removesuffix("$"))
            if not all(part in _WILD or _PART.fullmatch(part) for part in parts):
                raise ValueError(key)
            if {*parts} & _WILD.keys():
                self._wild.append((number, parts))
            else:
                (self._whole if key.startswith("^") else self._exact).setdefault(".".join(parts), number)
        if len(self._wild) > _MOST_WILD:
            raise ValueError(self.keys[self._wild[-1][0]])

    def of(self, module: str, otherwise: Any) -> Any:
        """Return the value of a module, by the first key that matches it."""
        if not self.keys:
            return otherwise
        parts = module.split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts))]
        numbers = [self._exact[end] for end in ends if end in self._exact]
        numbers += [self._whole[module]] if module in self._whole else []
        for number, key in self._wild:
            pairs = zip(parts[-len(key) :], key, strict=False)
            if len(key) <= len(parts) and all(
                _WILD[word].fullmatch(part) if word in _WILD else part == word for part, word in pairs
            ):
                numbers.append(number)
        if not numbers:
            return otherwise
        self.used.add(self.keys[min(numbers)])
        return self.values[min(numbers)]


def patterns_of(config: AdapterConfig) -> dict[str, dict[str, Any]]:
    """Return `rank_pattern` and `alpha_pattern` of files that name each expert; empty where PEFT needs none.

    PEFT joins an expert's gate and up into one pair of twice the rank, as transformers does, and takes twice
    the alpha for it, which is another scale with rslora.
    """
    if not config.experts or not (config.expert_rank or config.rslora):
        return {}
    rank = config.rank_of_experts
    return {
        "rank_pattern": {_GATE_UP: 2 * rank, _DOWN: rank, _EACH: rank},
        "alpha_pattern": {_GATE_UP: config.alpha * (2**0.5 if config.rslora else 2)},
    }
