"""Count, for the journal, rows of an attempt that are there twice, and held-out ones that are trained on."""

from lorad.driver.session import Session
from lorad.protocol.inputs import RowCounts
from lorad.rl.data import Example
from lorad.rl.tasks import TASKS
from lorad.spec.data import single

_MOST = 20_000  # rows of the training data that are looked at
_AT_ONCE = 500


def row_counts(session: Session) -> RowCounts:
    """Count the rows of the training data that are alike, and the held-out ones that are among them."""
    data = session.train_data
    held_out = [_known_by(example) for example in session.held_out]
    count = min(data.size or 0, _MOST)  # none of data that never end
    keys = {
        _known_by(example)
        for position in range(0, count, _AT_ONCE)
        for example in data.take(position, min(_AT_ONCE, count - position))
    }
    is_text = session.spec.data.chat_template == "never" or single(session.spec.data.train) in TASKS
    template = "unused" if is_text else "applied"
    return RowCounts(
        rows=count,
        distinct=len(keys),
        held_out=len(held_out),
        seen=sum(key in keys for key in held_out),
        template=template if session.tokenizer.has_chat_template else "none",
    )


def _known_by(example: Example) -> int:
    """Return a number for the prompt, and for the completions where those are trained on."""
    return hash((example.prompt, *(target.tokens.tobytes() for target in example.targets)))
