"""What is known of rows once all of them were seen."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator

from lorad.rl.kept.rows import Kept
from lorad.rl.rows.columns import find_value, value_of
from lorad.rl.sources import Row
from lorad.spec.data import Data


class Summary:
    """A summary grows while rows are made ready: their digest, and whether they have answers."""

    def __init__(self, data: Data, apart: Collection[str] = ()) -> None:
        """Begin with no row. Sources that are judged `apart` may lack answers where others have some."""
        self._data = data
        self._apart = apart
        self.digest = hashlib.sha256()
        self.answered = set[str]()  # sources, "" for all that are not judged apart
        self._unanswered = dict[str, Row]()
        self._said = b""
        self._row: Row | None = None

    def of(self, kept: Iterable[Kept]) -> Iterator[Kept]:
        """Yield what is kept. Raises SpecError for the first row without an answer, where others have one."""
        for sample in kept:
            if sample.row is not self._row:
                row = self._row = sample.row
                content = [row.number, row.values, *([row.source] if row.source else [])]
                self._said = json.dumps(content, sort_keys=True, default=str).encode()
                judged = row.source if row.source in self._apart else ""
                if find_value(row, self._data, "answer_key") is not None:
                    self.answered.add(judged)
                else:
                    self._unanswered.setdefault(judged, row)
            self.digest.update(self._said)
            yield sample
        for judged in self.answered & self._unanswered.keys():
            value_of(self._unanswered[judged], self._data, "answer_key")
