"""What rows say that is allowed and probably not meant."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from lorad.rl.rows.columns import find_value, text_of
from lorad.rl.rows.messages import ROLES
from lorad.rl.sources import Row
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data, DataFormat
from lorad.spec.model import Spec

_SHOWN = 40  # characters of a turn
_OF_TEMPLATES = ("tools", "chat_template_kwargs")  # columns that others give to the chat template
_SIDES = ("prompt_key", "completion_key", "chosen_key", "rejected_key")
_OF_CHATS = (*_OF_TEMPLATES, "functions", "system")
_EXCLUDING = ("weight", "loss", "train", "loss_mask", "trainable")  # keys of messages that others read


def row_doubts(key: str, rows: Iterable[Row], data: Data, form: DataFormat | None) -> list[str]:
    """Return warnings about rows that are chats for the model; each says which of them it is about.

    key: of the spec, which names the rows. form: None for prompts.
    """
    doubtful: dict[str, dict[tuple[str, int], str]] = {sentence: {} for sentence in _DOUBTS}
    for row in rows:
        for sentence, words_of in _DOUBTS.items():
            if words := words_of(row, data, form):
                doubtful[sentence].setdefault((row.source, row.number), words)
    return [f"{key}: {listed(words)}: {sentence}" for sentence, words in doubtful.items() if words]


def are_chats(spec: Spec, data: Data, tokenizer: Tokenizer) -> bool:
    """Return whether rows are rendered as chats; in an environment that decides what the model is told."""
    return spec.env.name is None and tokenizer.has_chat_template and data.chat_template == "auto"


def listed(words: dict[tuple[str, int], str]) -> str:
    """Return the first row by source and number, with its words, and the number of the others."""
    (source, number), first = next(iter(words.items()))
    others = f" and {len(words) - 1} more" if len(words) > 1 else ""
    return f"row {number}{f' of {source}' if source else ''} ({first}){others}"


def _answered(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return the last words of a prompt whose last turn is the assistant's."""
    prompt = _prompt(row, data, form)
    last = prompt[-1] if isinstance(prompt, list) else {}
    if (last.get("role") or last.get("from")) not in ("assistant", "gpt"):
        return ""
    content = last.get("content") or last.get("value") or "a call"
    text = " ".join((content if isinstance(content, str) else text_of(content)).split())
    return f"“{text}”" if len(text) <= _SHOWN else f"“…{text[-_SHOWN:]}”"


def _written_as_json(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return the beginning of a prompt that is a text of messages."""
    prompt = _prompt(row, data, form)
    if not isinstance(prompt, str) or not prompt.startswith("[{") or '"role"' not in prompt:
        return ""
    try:
        json.loads(prompt)
    except (ValueError, RecursionError):
        return ""
    return f"{prompt[:_SHOWN]}…"


def _says_nothing(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return a prompt whose text, or the text of each of its messages, is blank."""
    prompt = _prompt(row, data, form)
    turns = prompt if isinstance(prompt, list) else [{"content": prompt}]
    if any(key not in ("role", "from", "content", "value", "name") for turn in turns for key in turn):
        return ""
    texts = [turn.get("content", turn.get("value")) for turn in turns]
    is_blank = all(isinstance(text, str) and not text.strip() for text in texts)
    return json.dumps(prompt, ensure_ascii=False)[:_SHOWN] if is_blank else ""


def _of_no_role(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return the role of a message that no chat template knows."""
    keys = ("messages_key",) if form == "messages" else ("prompt_key",) if form is None else _SIDES
    chats = [find_value(row, data, key) for key in keys if key != "prompt_key" or data.prompt_format is None]
    messages = [message for chat in chats if isinstance(chat, list) for message in chat]
    roles = (message.get("role") for message in messages if isinstance(message, dict))
    return next((f"role {role}" for role in roles if isinstance(role, str) and role not in ROLES), "")


def _unshown(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return a column of the row that other programs show to the model."""
    beside = row.values.get("input")
    columns = row.values | beside if isinstance(beside, dict) else row.values
    names = _OF_CHATS if form == "messages" else _OF_TEMPLATES
    return next((name for name in names if columns.get(name) and name not in data.chat_template_kwargs), "")


def _excluded(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return the key, with its value, by which a row says that a turn of its chat is not to be trained."""
    chat = find_value(row, data, "messages_key") if form == "messages" else None
    excluding = (
        f"{key} {message[key]}"
        for message in (chat if isinstance(chat, list) else ())
        for key in _EXCLUDING
        if message.get(key) in (0, False)
    )
    return next(excluding, "")


def _prompt(row: Row, data: Data, form: DataFormat | None) -> Any:
    """Return the column of the prompt; None where the prompt is made of something else."""
    is_read = form != "messages" and data.prompt_format is None
    return find_value(row, data, "prompt_key") if is_read else None


_DOUBTS: dict[str, Callable[[Row, Data, DataFormat | None], str]] = {
    "the prompt ends with a turn of the assistant's, behind which another one is begun; drop that turn, or "
    "put the answer into the column of data.answer_key": _answered,
    "the prompt is a text, in which messages are written as JSON; make it a list": _written_as_json,
    "the prompt says nothing; leave the row out": _says_nothing,
    f"no such role; those of messages are {', '.join(ROLES)}": _of_no_role,
    "the model is not shown that column; data.chat_template_kwargs shows the same to all rows": _unshown,
    "nothing reads that key of a message, so that each turn of the assistant's is trained; give such a chat "
    "as prompt and completion": _excluded,
}
"""Sentences about a row, and what returns the words of a row for which they are true, else an empty text."""
