"""What the rows of a run say: what is probably not meant, and which of them lack what a reward asks for."""

from collections.abc import Iterable, Sequence

from lorad.driver.rewards import Rewarder
from lorad.errors import SpecError
from lorad.rl.completions.formats import format_of
from lorad.rl.completions.targets import TargetDataset
from lorad.rl.data import Dataset, Example, rows_behind
from lorad.rl.reward import renamed
from lorad.rl.rows.doubts import are_chats, row_doubts
from lorad.rl.sources import Row
from lorad.rl.tasks import TASKS
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import single
from lorad.spec.model import Spec


def check_rows(spec: Spec, data: Dataset, held_out: Sequence[Example], tokenizer: Tokenizer) -> list[str]:
    """Return warnings about the rows that are trained on, and about those of data.eval."""
    if not are_chats(spec, spec.data, tokenizer):
        return []
    form = data.form if isinstance(data, TargetDataset) else None
    warnings = row_doubts("data.train", data.rows, spec.data, form)
    if spec.data.eval is not None and single(spec.data.eval) not in TASKS and held_out:
        rows = rows_behind(held_out)
        form = format_of(rows[0], spec.data, spec.algorithm) if held_out[0].targets else None
        warnings += row_doubts("data.eval", rows, spec.data, form)
    return warnings


def refuse_lacking(rewarder: Rewarder, rows: Iterable[Row], *, has_answers: bool) -> None:
    """Raise SpecError for the first row that lacks a column that a reward requires."""
    seen = set[frozenset[str]]()
    for row in rows:
        columns = frozenset(row.values)
        if columns in seen:
            continue
        seen.add(columns)
        for name, missing in rewarder.lacking(row.values, has_answers=has_answers).items():
            raise SpecError(
                f"{row.where}: {name} needs {', '.join(missing)}, which this row does not have",
                key="reward",
                hint=f"{renamed(missing)}Give each row that column, or the parameter a default.",
            )
