"""Prompts, by position: what step n trains on follows from the spec and the number of prompts consumed before
it.
"""

import hashlib
import json
import math
import random
import re
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import Struct, structs

from lorad.box.memory import bounded_memory
from lorad.errors import SpecError
from lorad.rl.generated.rows import generated_rows
from lorad.rl.reward import RewardInput
from lorad.rl.rows.columns import find_value, prompt_of, text_of, value_of
from lorad.rl.rows.messages import messages_of, with_system
from lorad.rl.rows.shown import unshown
from lorad.rl.rows.variables import variables_of
from lorad.rl.sources import SUFFIXES, Row, labelled, read_rows
from lorad.rl.streaming.reader import Reader, eval_rows, reader_of, trained_on
from lorad.rl.streaming.stream import Stream
from lorad.rl.tasks import TASKS, Problem, problem
from lorad.rl.templates import Refused
from lorad.rl.tokenizer import Tokenizer, refusal
from lorad.spec.data import GENERATED, Data, Sources, labels_of, shares_of, single
from lorad.spec.model import Spec

Split = Literal["train", "test"]
EVAL_SEED = 0  # evals of runs with other seeds are of the same problems
CHUNK, _CHARACTERS = 1024, 4 << 20  # rows, and characters in them, that are tokenised at once


class Target(Struct, frozen=True, eq=False):
    """A completion in the data. tokens: int32 [t]; trained: bool [t]."""

    tokens: np.ndarray
    trained: np.ndarray


class Example(Struct, frozen=True):
    """One prompt as the model gets it.

    id: unique among the positions of a dataset. prompt: the text behind `tokens`, chat template applied. row:
    every column of the source, for reward functions. targets: completions to train on; none in
    reinforcement learning. source: where rows are of several, the one that it is of. prompt_value: the
    prompt as the row has it, a text or, behind data.system, messages. answer_value: the answer as the row
    has it.
    """

    id: str
    prompt: str
    answer: str
    tokens: list[int]
    row: dict[str, Any]
    targets: tuple[Target, ...] = ()
    source: str = ""
    prompt_value: str | list[dict[str, Any]] | None = None
    answer_value: Any = None

    def for_reward(self, completion: str, finish: str, completion_ids: list[int]) -> RewardInput:
        """Return what a reward is given for a completion of this prompt."""
        return RewardInput(
            prompt=self.prompt,
            completion=completion,
            answer=self.answer,
            finish=finish,
            row=self.row,
            completion_ids=completion_ids,
            prompt_value=self.prompt_value,
            answer_value=self.answer_value,
        )


class Dataset(ABC):
    """The prompts that a run trains or evaluates on.

    size: distinct prompts, None when endless.
    dropped: rows left out as too long.
    cut: rows that are shortened.
    prompt_lengths: tokens of the prompt of each row, before it is cut and also where it is left out for its
        length; nothing where the data never end.
    completion_lengths: tokens of the completions to train on; nothing where there are none.
    has_answers: see `Example`.
    digest: sha256 (hex) of the rows, "" for a builtin task; a resume detects a changed file by it.
    stream: where rows are read while the run trains, what they are read from.
    unshown: by source and number of a row, what of its chat the chat template does not write.
    """

    size: int | None = None
    dropped: int = 0
    cut: int = 0
    prompt_lengths: Sequence[int] = ()
    completion_lengths: Sequence[int] = ()
    has_answers: bool = True
    digest: str = ""
    stream: Stream[Any] | None = None
    unshown: Mapping[tuple[str, int], str] = {}

    @property
    def rows(self) -> Sequence[Row]:
        """Return the rows that are in memory, in any order: of a stream some, of a task none."""
        return ()

    @abstractmethod
    def take(self, position: int, n: int) -> list[Example]:
        """Return the `n` examples after the first `position`; equal arguments give equal examples, in any
        process.
        """


class NoData(Dataset):
    """The data of a run that gets them while it trains."""

    def take(self, position: int, n: int) -> list[Example]:
        return []


class TaskDataset(Dataset):
    """A builtin task: endless, and as plain text whatever the model's chat template."""

    def __init__(self, task: str, split: Split, seed: int, tokenizer: Tokenizer, limit: int) -> None:
        self._task, self._split, self._seed = task, split, seed
        self._tokenizer, self._limit = tokenizer, limit

    def take(self, position: int, n: int) -> list[Example]:
        problems = (problem(self._task, self._split, self._seed, position + index) for index in range(n))
        return [self._example(found) for found in problems]

    def _example(self, found: Problem) -> Example:
        tokens = self._tokenizer.encode(found.prompt, special=True)
        if len(tokens) > self._limit:
            raise SpecError(
                f"{found.prompt!r} of the task {self._task} has {len(tokens)} tokens, not {self._limit} at "
                "most",
                key="data.max_prompt_tokens",
                hint=f"Set it to {len(tokens)} or more.",
            )
        return Example(
            found.id, found.prompt, found.answer, tokens, {"prompt": found.prompt, "answer": found.answer}
        )


class _Order:
    """Rows of a dataset, epoch after epoch. Shuffled, every epoch has its own order, from (seed, epoch)."""

    def __init__(self, size: int, seed: int | str, *, shuffled: bool) -> None:
        self._size, self._seed, self._shuffled = size, seed, shuffled
        self._epoch, self._places = -1, list[int]()

    def place(self, index: int) -> tuple[int, int]:
        """Return the row at a position of the endless sequence, and its epoch."""
        epoch, offset = divmod(index, self._size)
        if epoch != self._epoch:
            places = list(range(self._size))
            if self._shuffled:
                random.Random(f"{self._seed}/{epoch}").shuffle(places)
            self._epoch, self._places = epoch, places
        return self._places[offset], epoch


class _Mixture:
    """Rows of several sources in given shares, each source in its own order, epoch after epoch.

    At each position comes the source that is furthest behind its share, the first of such: after n positions
    each has its share of n, to less than the number of sources. So shares hold within every step.
    """

    def __init__(
        self, labels: Sequence[str], shares: Mapping[str, float], seed: int, *, shuffled: bool
    ) -> None:
        """labels: the source of each row. Raises SpecError where a source has no row."""
        total = math.fsum(shares.values())
        self._shares = [share / total for share in shares.values()]
        rows: dict[str, list[int]] = {label: [] for label in shares}
        for place, label in enumerate(labels):
            rows[label].append(place)
        if empty := [label for label, places in rows.items() if not places]:
            hint = "Leave it out, or see whether its rows are too long."
            raise SpecError(f"{empty[0]} has no usable row", key="data", hint=hint)
        self._rows = [*rows.values()]
        seeds = (f"{seed}/{label}" for label in shares)
        self._orders = [
            _Order(len(places), own, shuffled=shuffled) for places, own in zip(self._rows, seeds, strict=True)
        ]
        self._counts = [0] * len(self._rows)
        self._sources, self._numbers = array("H"), array("Q")  # of each position that was asked for
        self._growing = threading.Lock()

    def place(self, index: int) -> tuple[int, int]:
        """Return the row at a position of the endless sequence, and the epoch of its source."""
        with self._growing:
            for position in range(len(self._sources), index + 1):
                behind = [s * (position + 1) - n for s, n in zip(self._shares, self._counts, strict=True)]
                chosen = behind.index(max(behind))
                self._sources.append(chosen)
                self._numbers.append(self._counts[chosen])
                self._counts[chosen] += 1
            source, number = self._sources[index], self._numbers[index]
            place, epoch = self._orders[source].place(number)
            return self._rows[source][place], epoch


def chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Cut rows into parts that are large enough to be tokenised at once, and take little memory."""
    chunk, characters = list[Row](), 0
    for row in rows:
        chunk.append(row)
        characters += _length(row.values)
        if len(chunk) == CHUNK or characters >= _CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _length(value: Any) -> int:
    """Count the characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_length, value.values()))
    return sum(map(_length, value)) if isinstance(value, list) else 0


def order_of(rows: Sequence[Row], sources: Sources, seed: int, *, shuffled: bool) -> _Order | _Mixture:
    """Return the order of rows of these sources. Raises SpecError."""
    if shares := shares_of(sources):
        return _Mixture([row.source for row in rows], shares, seed, shuffled=shuffled)
    return _Order(len(rows), seed, shuffled=shuffled)


def name_of(sources: Sources) -> str:
    """Return how errors, and rows of one source, call them."""
    if isinstance(sources, str) and Path(sources).suffix.lower() not in SUFFIXES:
        sources = re.sub("@[^:]*", "", sources)  # the commit of a hub dataset is no part of its name
    return Path(sources).name if isinstance(sources, str) else ", ".join(labels_of(sources).values())


class _Prompts(Dataset):
    """Rows that hold prompts."""

    def __init__(self, sources: Sources, data: Data, tokenizer: Tokenizer) -> None:
        self._name, self._data, self._tokenizer = name_of(sources), data, tokenizer
        self.unshown = self._unshown = dict[tuple[str, int], str]()
        self._lengths: array[int] | None = None  # of the prompts, where they are kept

    def _kept(self, rows: Iterable[Row]) -> Iterator[tuple[Row, str]]:
        """Yield the rows that are kept, each with its prompt as text."""
        for chunk in chunks(rows):
            texts = self._rendered(chunk)
            for row, text, tokens in zip(chunk, texts, self._encode(texts), strict=True):
                if not tokens:
                    raise SpecError(
                        f"{row.where}: the prompt is empty", hint="Every prompt has at least one token."
                    )
                if self._lengths is not None:
                    self._lengths.append(len(tokens))
                is_short = len(tokens) <= self._data.max_prompt_tokens
                if is_short or self._data.too_long == "truncate":
                    self.cut += not is_short
                    yield row, text
                else:
                    self.dropped += 1

    def _examples(self, chosen: Sequence[tuple[Row, str, int]]) -> list[Example]:
        """Return what the model gets of rows, each with its prompt as text and its epoch."""
        encoded = self._encode([text for _, text, _ in chosen])
        return [self._example(*one, tokens) for one, tokens in zip(chosen, encoded, strict=True)]

    def _example(self, row: Row, prompt: str, epoch: int, tokens: list[int]) -> Example:
        value = value_of(row, self._data, "answer_key") if self.has_answers else ""
        if len(tokens) > self._data.max_prompt_tokens:
            tokens = tokens[-self._data.max_prompt_tokens :]
            prompt = self._tokenizer.decode(tokens, skip_special=False)
        number = f"{row.source or self._name}/{row.number}/{epoch}"
        return Example(
            number,
            prompt,
            text_of(value),
            tokens,
            row.values,
            source=row.source,
            prompt_value=prompt_value_of(row, self._data),
            answer_value=value,
        )

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer.encode_batch(texts, special=not self._templated)

    @property
    def _templated(self) -> bool:
        return self._data.chat_template == "auto" and self._tokenizer.has_chat_template

    def _rendered(self, rows: Sequence[Row]) -> list[str]:
        """Return the prompts as text; with a chat template a string is what the user says."""
        if not self._templated:
            return [self._plain(row) for row in rows]
        chats = [with_system(self._data, messages_of(prompt_of(row, self._data), row)) for row in rows]
        own, settings = [variables_of(row) for row in rows], self._data.chat_template_kwargs
        try:
            texts = self._tokenizer.chats(chats, settings, own, continues=True)
        except Refused as error:
            raise refusal(error, rows[error.index].where) from error
        for row, chat, variables, text in zip(rows, chats, own, texts, strict=True):
            if words := unshown(chat, variables, text):
                self._unshown.setdefault((row.source, row.number), words)
        return texts

    def _plain(self, row: Row) -> str:
        value = prompt_of(row, self._data)
        messages_of(value, row)
        if isinstance(value, str):
            return value
        never = self._data.chat_template == "never"
        why = "data.chat_template is never" if never else "the model has no chat template"
        raise SpecError(
            f"{row.where}: the prompt is a list of messages but {why}", hint="Give prompts as strings."
        )


class _RowDataset(_Prompts):
    """Rows in memory."""

    def __init__(
        self, sources: Sources, rows: Iterable[Row], data: Data, tokenizer: Tokenizer, seed: int
    ) -> None:
        """Checks every row. Raises SpecError with `file:line`, and when no row is left."""
        super().__init__(sources, data, tokenizer)
        self.prompt_lengths = self._lengths = array("Q")
        with bounded_memory(self._name):
            kept = list(self._kept(rows))
        self._rows, self._texts = [row for row, _ in kept], [text for _, text in kept]
        self.size = len(self._rows)
        self.digest = digest_of(self._rows)
        self.has_answers = any(find_value(row, data, "answer_key") is not None for row in self._rows)
        if not self._rows and not self.dropped:
            raise SpecError(f"{self._name} has no row", key="data", hint="Add rows.")
        if not self._rows:
            raise SpecError(
                f"{self._name} has no usable row, {self.dropped} were longer than {data.max_prompt_tokens} "
                "tokens",
                key="data",
                hint="Raise data.max_prompt_tokens or add rows.",
            )
        self._order = order_of(self._rows, sources, seed, shuffled=data.shuffle)
        if self.has_answers:
            for row in self._rows:
                value_of(row, data, "answer_key")

    @property
    def rows(self) -> Sequence[Row]:
        return self._rows

    def take(self, position: int, n: int) -> list[Example]:
        chosen = [self._order.place(index) for index in range(position, position + n)]
        return self._examples([(self._rows[place], self._texts[place], epoch) for place, epoch in chosen])


class _Streamed(_Prompts):
    """Rows that are read while the run trains."""

    def __init__(self, source: str, reader: Reader, data: Data, tokenizer: Tokenizer, seed: int) -> None:
        """Checks the first rows. Raises SpecError with their place."""
        super().__init__(source, data, tokenizer)
        self.digest = hashlib.sha256(reader.known.encode()).hexdigest()
        self.stream = self._rows = Stream(reader, self._usable, seed, data.buffer, shuffled=data.shuffle)
        (first, _), _ = self._rows.item(0)
        self.has_answers = find_value(first, data, "answer_key") is not None

    @property
    def rows(self) -> Sequence[Row]:
        return [row for row, _ in self._rows.known()]

    def take(self, position: int, n: int) -> list[Example]:
        chosen = [self._rows.item(index) for index in range(position, position + n)]
        return self._examples([(row, text, epoch) for (row, text), epoch in chosen])

    def _usable(self, rows: list[Row]) -> list[tuple[Row, str]]:
        return [*self._kept(trained_on(rows, self._data))]


def load_data(
    source: Sources, split: Split, data: Data, tokenizer: Tokenizer, seed: int, cwd: Path
) -> Dataset:
    """Return the dataset of `data.train` or `data.eval`; `cwd` is where relative paths start.

    Raises SpecError.
    """
    if isinstance(source, str) and source in TASKS:
        refuse_for_chats(data, f"prompts of the task {source} are plain text")
        return TaskDataset(source, split, seed, tokenizer, data.max_prompt_tokens)
    if not tokenizer.has_chat_template:
        refuse_for_chats(data, "the model has no chat template")
    if data.streaming and split == "train":
        name = single(source)
        return _Streamed(name, reader_of(name, split, cwd), data, tokenizer, seed)
    return _RowDataset(source, rows_of(source, split, data, cwd), data, tokenizer, seed)


def rows_of(source: Sources, split: Split, data: Data, cwd: Path) -> Iterator[Row]:
    """Yield the rows of `data.train` or `data.eval`, where that is no builtin task. Raises SpecError."""

    def read(name: str) -> Iterator[Row]:
        is_generated = name.startswith(GENERATED)
        return generated_rows(name, split, data, cwd) if is_generated else read_rows(name, split, cwd)

    return labelled(source, read)


def load_eval(data: Data, tokenizer: Tokenizer, problems: int, cwd: Path) -> list[Example]:
    """Return the first `problems` held-out problems, the same for every run; empty when the spec has no eval.

    Without `data.eval` they are the test split of the task in `data.train`, or the rows of a stream that are
    held out; a file is taken in its order.
    """
    has_split = single(data.train) in TASKS or single(data.train).startswith(GENERATED)
    source = data.eval or (data.train if has_split or data.streaming else None)
    if source is None:
        return []
    if isinstance(source, str) and source in TASKS:
        return TaskDataset(source, "test", EVAL_SEED, tokenizer, data.max_prompt_tokens).take(0, problems)
    ordered = structs.replace(data, shuffle=False)
    if data.streaming and (rows := eval_rows(data, problems, cwd)) is not None:
        first = [*rows]
        streamed = _RowDataset(source, first, ordered, tokenizer, EVAL_SEED) if first else None
        return streamed.take(0, streamed.size or 0) if streamed else []
    found = load_data(source, "test", ordered, tokenizer, EVAL_SEED, cwd)
    return found.take(0, min(problems, found.size or problems))


def rows_behind(examples: Sequence[Example]) -> list[Row]:
    """Return the rows that examples are made of."""
    rows = []
    for example in examples:
        name, number, _ = example.id.rsplit("/", 2)
        number = number.partition(".")[0]  # of a turn
        rows.append(Row(int(number), f"{name}:{number}", example.row, example.source))
    return rows


def load_set(spec: Spec, name: str, tokenizer: Tokenizer, cwd: Path) -> list[Example]:
    """Return the problems of a set of `eval.sets`, in their order and the same for every run.

    Raises SpecError.
    """
    one, data = spec.eval.sets[name], data_of_set(spec, name)
    try:
        return load_eval(data, tokenizer, one.problems or spec.eval.problems, cwd)
    except SpecError as error:
        place = f"eval.sets.{name}.data"
        raise SpecError(f"{error.problem}", key=place, hint=error.hint) from error


def data_of_set(spec: Spec, name: str) -> Data:
    """Return the section `data` that a set of `eval.sets` is read with."""
    one = spec.eval.sets[name]
    keys: dict[str, Any] = {
        key: value for key in ("prompt_key", "answer_key") if (value := getattr(one, key)) is not None
    }
    if not one.data.startswith(GENERATED):
        keys |= {"args": {}, "python": None}
    if one.data in TASKS or one.data.startswith(GENERATED):
        keys |= {"streaming": False}
    return structs.replace(spec.data, train=one.data, eval=one.data, **keys)


def prompt_value_of(row: Row, data: Data) -> str | list[dict[str, Any]]:
    """Return the prompt as the row has it: a text or, behind data.system, messages."""
    value = prompt_of(row, data)
    return value if isinstance(value, str) else with_system(data, messages_of(value, row))


def refuse_for_chats(data: Data, why: str) -> None:
    """Raise SpecError for keys that only chat templates read."""
    for key in ("system", "chat_template_kwargs"):
        if getattr(data, key):
            raise SpecError(f"{why}, so that nothing would read it", key=f"data.{key}", hint="Leave it out.")


def digest_of(rows: Iterable[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        said = [row.number, row.values, *([row.source] if row.source else [])]
        digest.update(json.dumps(said, sort_keys=True, default=str).encode())
    return digest.hexdigest()
