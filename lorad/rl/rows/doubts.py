"""What rows say that is allowed and probably not meant."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lorad.rl.rows.columns import find_value, text_of
from lorad.rl.rows.messages import ROLES, TRAINED_KEYS, chat_in
from lorad.rl.rows.variables import SETTINGS, TOOLS, column_of, is_of_tools
from lorad.rl.sources import Row
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data, DataFormat
from lorad.spec.model import Spec

_SHOWN = 40  # characters of a turn
_SIDES = ("prompt_key", "completion_key", "chosen_key", "rejected_key")


def row_doubts(key: str, rows: Iterable[Row], data: Data, form: DataFormat | None) -> list[str]:
    """Return warnings about rows that are chats, prompts where the form is None.

    Each begins with the key of the spec that names the rows, and says which rows it is about.
    """
    doubtful: dict[str, dict[tuple[str, int], str]] = {sentence: {} for sentence in _DOUBTS}
    for row in rows:
        for sentence, words_of in _DOUBTS.items():
            if words := words_of(row, data, form):
                doubtful[sentence].setdefault((row.source, row.number), words)
    return [f"{key}: {listed(words)}: {sentence}" for sentence, words in doubtful.items() if words]


def are_chats(spec: Spec, data: Data, tokenizer: Tokenizer) -> bool:
    """Return whether rows are rendered as chats; an environment decides itself what the model reads."""
    return spec.env.name is None and tokenizer.has_chat_template and data.chat_template == "auto"


def listed(words: Mapping[tuple[str, int], str]) -> str:
    """Return the first row by source and number, with its words, and the number of the others."""
    (source, number), first = next(iter(words.items()))
    others = f" and {len(words) - 1} more" if len(words) > 1 else ""
    return f"row {number}{f' of {source}' if source else ''} ({first}){others}"


def _last_words(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return the last words of a prompt whose last turn is the assistant's."""
    prompt = _prompt(row, data, form)
    last = prompt[-1] if isinstance(prompt, list) else {}
    if (last.get("role") or last.get("from")) not in ("assistant", "gpt"):
        return ""
    content = last.get("content") or last.get("value") or "a call"
    text = " ".join((content if isinstance(content, str) else text_of(content)).split())
    return f"“{text}”" if len(text) <= _SHOWN else f"“…{text[-_SHOWN:]}”"


def _read_as_chat(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return the beginning of a text that is read as a chat, as its messages are written in it as JSON."""
    if form == "messages":
        return _as_json(row, data, "messages_key")
    return _as_json(row, data, "prompt_key") if data.prompt_format is None else ""


def _left_as_text(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return the beginning of a completion that is a text of messages."""
    sides = _SIDES[1:] if form not in (None, "messages") else ()
    return next(filter(None, (_as_json(row, data, key) for key in sides)), "")


def _as_json(row: Row, data: Data, setting: str) -> str:
    """Return the beginning of a column that is a text of messages; "" for another."""
    value = find_value(row, data, setting)
    return f"{value[:_SHOWN]}…" if isinstance(value, str) and chat_in(value) is not value else ""


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
    read = [key for key in keys if key != "prompt_key" or data.prompt_format is None]
    chats = [chat_in(find_value(row, data, key)) for key in read]
    messages = [message for chat in chats if isinstance(chat, list) for message in chat]
    roles = (message.get("role") for message in messages if isinstance(message, dict))
    return next(
        (f"role {role}" for role in roles if isinstance(role, str) and role not in (*ROLES, "function")), ""
    )


def _unread(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return a column of the row that other programs show to the model, and that is not read here."""
    names = [name for name in TOOLS if (tools := column_of(row, name)) and not is_of_tools(tools)]
    names += [SETTINGS] if isinstance(column_of(row, SETTINGS), list | str) else []
    others = ("system", "enable_thinking") if form == "messages" else ("enable_thinking",)
    return next(iter(names + [name for name in others if row.values.get(name) not in (None, "")]), "")


def _of_another(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return the role of a message that says that it is trained, and is not the assistant's."""
    chat = chat_in(find_value(row, data, "messages_key")) if form == "messages" else None
    roles = (
        speaker
        for message in (chat if isinstance(chat, list) else ())
        if (speaker := message.get("role") or message.get("from")) not in ("assistant", "gpt")
        and any(message.get(key) for key in TRAINED_KEYS)
    )
    return next((f"role {role}" for role in roles), "")


def _with_null(row: Row, data: Data, form: DataFormat | None) -> str:
    """Return the name of an argument of a trained call that the row itself, and no data frame, made null."""
    is_written = form == "messages" and not row.is_of_columns
    chat = chat_in(find_value(row, data, "messages_key")) if is_written else None
    for message in chat if isinstance(chat, list) else ():
        for call in message.get("tool_calls") or ():
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, Mapping) and (names := [k for k, v in arguments.items() if v is None]):
                return f"argument {names[0]}"
    return ""


def _prompt(row: Row, data: Data, form: DataFormat | None) -> Any:
    """Return the column of the prompt; None where the prompt is made of something else."""
    is_read = form != "messages" and data.prompt_format is None
    return chat_in(find_value(row, data, "prompt_key")) if is_read else None


_DOUBTS: dict[str, Callable[[Row, Data, DataFormat | None], str]] = {
    "the prompt ends with a turn of the assistant's, which the model continues; drop that turn where it is "
    "an answer": lambda row, data, form: "" if form else _last_words(row, data, form),
    "the prompt ends with a turn of the assistant's, behind which another one is begun; drop that turn, or "
    "put it into the completion": lambda row, data, form: _last_words(row, data, form) if form else "",
    "the text is a chat in JSON, and read as its messages": _read_as_chat,
    "the completion is a text, in which messages are written as JSON; make it a list": _left_as_text,
    "the prompt says nothing; leave the row out": _says_nothing,
    f"no such role; those of messages are {', '.join(ROLES)}": _of_no_role,
    "the model is not shown that column; data.chat_template_kwargs shows the same to all rows, and a column "
    "chat_template_kwargs what is a row's": _unread,
    "such a message says that it is trained, and only turns of the assistant's are": _of_another,
    "it is null, and trained as null; leave the key out where a data frame made it up": _with_null,
}
"""Sentences about a row, and what returns the words of a row for which they are true, else an empty text."""
