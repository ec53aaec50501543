"""Prompts, by position: what step n trains on follows from the spec and the number of prompts before it."""

import hashlib
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import Struct, structs

from lorad.box.memory import bounded_memory
from lorad.errors import SpecError
from lorad.rl.generated.environment import environment_rows
from lorad.rl.generated.rows import generated_rows
from lorad.rl.kept.cache import CacheKey, kept_rows, key_of
from lorad.rl.kept.order import order_of
from lorad.rl.kept.rows import Kept, KeptRows, RowFacts, RowsOf, Target
from lorad.rl.kept.summary import Summary
from lorad.rl.reward import RewardInput
from lorad.rl.rows.columns import find_value, prompt_of, text_of, value_of
from lorad.rl.rows.messages import chat_in, messages_of, with_system
from lorad.rl.rows.shown import unshown
from lorad.rl.rows.variables import variables_of
from lorad.rl.sources import SUFFIXES, Row, labelled, read_rows
from lorad.rl.streaming.reader import Reader, eval_rows, is_held_out, reader_of
from lorad.rl.streaming.stream import Stream
from lorad.rl.tasks import TASKS, problem
from lorad.rl.templates import Refused
from lorad.rl.tokenizer import Tokenizer, refusal
from lorad.spec.data import GENERATED, MADE, Data, DataFormat, Sources, labels_of, single, sources_with_own
from lorad.spec.env import VERIFIERS, EnvSpec
from lorad.spec.model import Spec

Split = Literal["train", "test"]
EVAL_SEED = 0  # evals of runs with other seeds are of the same problems
_NOTED = 100_000  # rows of which something is noted, at most
CHUNK = 1024  # rows that are tokenised at once
_CHARACTERS = 4 << 20  # characters in rows that are tokenised at once
_NO_TEMPLATE = "the model has no chat template"


class Example(Struct, frozen=True):
    """One prompt as the model gets it.

    id: A name that no other position of the dataset has.
    prompt: The text behind `tokens`, with the chat template applied.
    row: Every column of the source, for reward functions.
    targets: The completions to train on; none in reinforcement learning.
    source: The source that it is from, where there are several.
    prompt_value: The prompt as the row has it, a text or, behind data.system, messages.
    answer_value: The answer as the row has it.
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

    def for_reward(
        self, completion: str, finish: str, completion_ids: list[int], raw_completion: str = ""
    ) -> RewardInput:
        """Return what a reward is given for a completion of this prompt."""
        return RewardInput(
            prompt=self.prompt,
            completion=completion,
            answer=self.answer,
            finish=finish,
            row=self.row,
            completion_ids=completion_ids,
            raw_completion=raw_completion,
            prompt_value=self.prompt_value,
            answer_value=self.answer_value,
        )


class Dataset(ABC):
    """The prompts that a run trains or evaluates on.

    size: How many distinct prompts there are, None when endless.
    dropped: How many rows are left out as too long.
    cut: How many rows are shortened.
    prompt_lengths: The tokens of the prompt of each row, before it is cut and also where it is left out
        for its length; nothing where the data never end.
    completion_lengths: The tokens of the completions to train on; nothing where there are none.
    has_answers: See `Example`.
    digest: The sha256 (hex) of the rows, "" for a builtin task; a resume detects a changed file by it.
    stream: What rows are read from, where they are read while the run trains.
    unshown: What the chat template does not write of the chat of a row, by its source and number.
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
        """Return the rows that are in memory, in any order; a stream has some there, a task none."""
        return ()

    @abstractmethod
    def take(self, position: int, n: int) -> list[Example]:
        """Return the `n` examples after the first `position`, in any process the same ones."""


class NoData(Dataset):
    """The data of a run that gets them while it trains."""

    def take(self, position: int, n: int) -> list[Example]:
        return []


class TaskDataset(Dataset):
    """A builtin task: endless, and as plain text whatever the model's chat template.

    trains_answers: Whether the answers are completions to train on.
    """

    trains_answers = False

    def __init__(self, task: str, split: Split, seed: int, tokenizer: Tokenizer, limit: int) -> None:
        self._task = task
        self._split = split
        self._seed = seed
        self._tokenizer = tokenizer
        self._limit = limit

    def take(self, position: int, n: int) -> list[Example]:
        examples = []
        for index in range(position, position + n):
            question = problem(self._task, self._split, self._seed, index)
            tokens = self._tokenizer.encode(question.prompt, special=True)
            if (size := len(tokens)) > self._limit:
                why = f"{question.prompt!r} of the task {self._task} has {size} tokens, not {self._limit}"
                hint = f"Set it to {size} or more."
                raise SpecError(f"{why} at most", key="data.max_prompt_tokens", hint=hint)
            row = {"prompt": question.prompt, "answer": question.answer}
            examples.append(Example(question.id, question.prompt, question.answer, tokens, row))
        return [with_answer(e, self._tokenizer) for e in examples] if self.trains_answers else examples


def with_answer(example: Example, tokenizer: Tokenizer) -> Example:
    """Return an example that trains on its answer."""
    tokens = [*tokenizer.encode(example.answer), *tokenizer.eos_ids[:1]]
    target = Target(np.array(tokens, np.int32), np.ones(len(tokens), np.bool_))
    return structs.replace(example, targets=(target,))


def chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Cut rows into parts that are large enough to be tokenised at once, and take little memory."""
    chunk = list[Row]()
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += _length(row.values)
        if len(chunk) == CHUNK or characters >= _CHARACTERS:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk


def _length(value: Any) -> int:
    """Count the characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_length, value.values()))
    return sum(map(_length, value)) if isinstance(value, list) else 0


def name_of(sources: Sources) -> str:
    """Return the name that errors, and rows of one source, give the sources."""
    if isinstance(sources, str) and Path(sources).suffix.lower() not in SUFFIXES:
        sources = re.sub("@[^:]*", "", sources)  # the commit of a hub dataset is no part of its name
    return Path(sources).name if isinstance(sources, str) else ", ".join(labels_of(sources).values())


class PreparedRows(Dataset):
    """Rows as the model gets them, made ready before the run, or while it trains where they are streamed.

    form: The format of rows that hold completions.
    unended: How many trained turns have no end token, so that a model learns not to end them.
    split: How many rows are split, so that each of their turns is a sample.
    """

    form: DataFormat = "auto"
    unended: int = 0
    split: int = 0
    _kept: KeptRows

    def __init__(self, sources: Sources, data: Data, tokenizer: Tokenizer, seed: int) -> None:
        self._sources = sources
        self._name = name_of(sources)
        self._data = data
        self._tokenizer = tokenizer
        self._seed = seed
        self._templated = data.chat_template == "auto" and tokenizer.has_chat_template
        never = data.chat_template == "never"
        self._why_plain = "data.chat_template is never" if never else _NO_TEMPLATE
        self._lengths = array("I")  # of prompts
        self.unshown: dict[tuple[str, int], str] = {}

    @abstractmethod
    def _prepare(self, rows: Iterable[Row]) -> Iterator[Kept]:
        """Yield the samples of rows, without the ones that are too long. Raises SpecError."""

    @abstractmethod
    def _example(self, kept: Kept, epoch: int) -> Example: ...

    @property
    def rows(self) -> Sequence[Row]:
        return RowsOf(self._kept) if self.stream is None else [kept.row for kept in self.stream.in_memory()]

    def take(self, position: int, n: int) -> list[Example]:
        positions = range(position, position + n)
        if self.stream is not None:
            return [self._example(*self.stream.item(place)) for place in positions]
        chosen = [self._order.place(place) for place in positions]
        return [self._example(self._kept[place], epoch) for place, epoch in chosen]

    def keep_unshown(self, row: Row, words: str) -> None:
        """Keep what a row has that the model is not shown; a stream does so for its first rows alone."""
        if words and len(self.unshown) < _NOTED:
            self.unshown[row.source, row.number] = words

    def open_rows(self, key: CacheKey | None, make: Callable[[], Iterator[Kept]], summary: Summary) -> None:
        """Make all rows ready, unless they are kept under `key`, and take up what follows from them."""

        def facts() -> RowFacts:
            counts = (self.dropped, self.cut, self.unshown, self._lengths.tobytes())
            about = (self.form, self.split, self.unended)
            return RowFacts(bool(summary.answered), summary.digest.hexdigest(), *counts, *about)

        with bounded_memory(self._name):
            self._kept, summed = kept_rows(key, make, facts)
        self.size = len(self._kept)
        for name in ("digest", "has_answers", "dropped", "cut", "unshown", "form", "split", "unended"):
            setattr(self, name, getattr(summed, name))
        self.prompt_lengths = array("I", summed.lengths)
        if self._kept:
            self._order = order_of(self._kept, self._sources, self._seed, shuffled=self._data.shuffle)

    def open_stream(self, reader: Reader) -> None:
        """Check the first rows of a stream. Raises SpecError with their place."""
        data = self._data
        self.digest = hashlib.sha256(reader.identity.encode()).hexdigest()
        self.stream = Stream(reader, self.usable, self._seed, data.buffer, shuffled=data.shuffle)
        first, _ = self.stream.item(0)
        self.has_answers = find_value(first.row, data, "answer_key") is not None

    def usable(self, rows: list[Row]) -> list[Kept]:
        """Return the samples of a stream's rows that are trained on."""
        trained = [row for row in rows if self._data.eval is not None or not is_held_out(row, self._data)]
        return [*self._prepare(trained)]


class _Prompts(PreparedRows):
    """Rows that hold prompts."""

    def _prepare(self, rows: Iterable[Row]) -> Iterator[Kept]:
        for chunk in chunks(rows):
            texts = self._rendered(chunk)
            places = [row.where for row in chunk]
            encoded = self._tokenizer.encode_batch(texts, special=not self._templated, places=places)
            for row, text, tokens in zip(chunk, texts, encoded, strict=True):
                if not tokens:
                    raise SpecError(
                        f"{row.where}: the prompt is empty", hint="Every prompt has at least one token."
                    )
                self._lengths.append(len(tokens))
                is_short = len(tokens) <= self._data.max_prompt_tokens
                if is_short or self._data.too_long == "truncate":
                    self.cut += not is_short
                    yield Kept(row, str(row.number), text, np.array(tokens, np.int32))
                else:
                    self.dropped += 1

    def _example(self, kept: Kept, epoch: int) -> Example:
        row = kept.row
        prompt = kept.text
        tokens = kept.prompt.tolist()
        is_answered = self.has_answers and find_value(row, self._data, "answer_key") is not None
        value = value_of(row, self._data, "answer_key") if is_answered else ""
        if len(tokens) > self._data.max_prompt_tokens:
            tokens = tokens[-self._data.max_prompt_tokens :]
            prompt = self._tokenizer.decode(tokens, skip_special=False)
        return Example(
            f"{row.source or self._name}/{kept.name}/{epoch}",
            prompt,
            text_of(value),
            tokens,
            row.values,
            source=row.source,
            prompt_value=prompt_value_of(row, self._data),
            answer_value=value,
        )

    def _rendered(self, rows: Sequence[Row]) -> list[str]:
        """Return the prompts as text; with a chat template a string is what the user says."""
        texts = list[str]()
        if not self._templated:
            for row in rows:
                value = prompt_of(row, self._data)
                messages_of(value, row)
                if not isinstance(value, str):
                    problem = f"{row.where}: the prompt is a list of messages but {self._why_plain}"
                    raise SpecError(problem, hint="Give prompts as strings.")
                texts.append(value)
            return texts
        chats = [with_system(self._data, messages_of(prompt_of(row, self._data), row)) for row in rows]
        own = [variables_of(row) for row in rows]
        settings = self._data.chat_template_kwargs
        try:
            texts = self._tokenizer.chats(chats, settings, own, continues=True)
        except Refused as error:
            raise refusal(error, rows[error.index].where) from error
        for row, chat, variables, text in zip(rows, chats, own, texts, strict=True):
            self.keep_unshown(row, unshown(chat, variables, text))
        return texts


class RowDataset(_Prompts):
    """Rows that are made ready before the run."""

    def __init__(
        self,
        sources: Sources,
        rows: Iterable[Row],
        data: Data,
        tokenizer: Tokenizer,
        seed: int,
        key: CacheKey | None = None,
    ) -> None:
        """Check every row, unless they are kept under `key`. Raises SpecError, also when no row is left."""
        super().__init__(sources, data, tokenizer, seed)
        labels = labels_of(sources)
        summary = Summary(data, [labels[name] for name in sources_with_own(sources)])
        self.open_rows(key, lambda: summary.of(self._prepare(rows)), summary)
        if not self._kept and not self.dropped:
            raise SpecError(f"{self._name} has no row", key="data", hint="Add rows.")
        if not self._kept:
            raise SpecError(
                f"{self._name} has no usable row, {self.dropped} were longer than {data.max_prompt_tokens} "
                "tokens",
                key="data",
                hint="Raise data.max_prompt_tokens or add rows.",
            )

    def part(self, labels: Collection[str], n: int) -> tuple[list[Row], list[Example]]:
        """Return the rows of some sources, and the first `n` of them as examples."""
        places = [place for place, label in enumerate(self._kept.labels) if label in labels]
        examples = [self._example(self._kept[place], 0) for place in places[:n]]
        return [self._kept.row(place) for place in places], examples


class _Streamed(_Prompts):
    """Prompts that are read while the run trains."""

    def __init__(self, source: str, reader: Reader, data: Data, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(source, data, tokenizer, seed)
        self.open_stream(reader)


def load_data(
    source: Sources, split: Split, data: Data, tokenizer: Tokenizer, seed: int, cwd: Path
) -> Dataset:
    """Return the dataset of `data.train` or `data.eval`; paths are relative to `cwd`. Raises SpecError."""
    if isinstance(source, str) and source in TASKS:
        _refuse_for_chats(data, f"prompts of the task {source} are plain text")
        return TaskDataset(source, split, seed, tokenizer, data.max_prompt_tokens)
    refuse_for_plain(data, tokenizer)
    if data.streaming and split == "train":
        name = single(source)
        return _Streamed(name, reader_of(name, split, cwd), data, tokenizer, seed)
    key = key_of(source, data, tokenizer, cwd, split)
    return RowDataset(source, rows_of(source, split, data, cwd), data, tokenizer, seed, key)


def rows_of(source: Sources, split: Split, data: Data, cwd: Path) -> Iterator[Row]:
    """Yield the rows of `data.train` or `data.eval`, where that is no builtin task. Raises SpecError."""

    def read(name: str) -> Iterator[Row]:
        if name.startswith(VERIFIERS):
            return environment_rows(sources_with_own(source)[name].played, split, cwd)
        is_generated = name.startswith(GENERATED)
        return generated_rows(name, split, data, cwd) if is_generated else read_rows(name, split, cwd)

    return labelled(source, read)


def load_eval(
    data: Data, tokenizer: Tokenizer, problems: int, cwd: Path, env: EnvSpec | None = None
) -> list[Example]:
    """Return the first `problems` held-out problems, the same for every run; empty when the spec has no eval.

    Without `data.eval` they are the test split of the task in `data.train`, or the rows of a stream that are
    held out; a file is taken in its order. An environment of `env` has rows of its own.
    """
    has_split = single(data.train) in TASKS or single(data.train).startswith(MADE)
    source = data.eval or (data.train if has_split or data.streaming else None)
    if source is None:
        return []
    if isinstance(source, str) and source in TASKS:
        return TaskDataset(source, "test", EVAL_SEED, tokenizer, data.max_prompt_tokens).take(0, problems)
    ordered = structs.replace(data, shuffle=False)
    rows = eval_rows(data, problems, cwd) if data.streaming else None
    if env is not None and env.package:
        rows = islice(environment_rows(env, "test", cwd), problems)
    if rows is not None:
        first = [*rows]
        held_out = RowDataset(source, first, ordered, tokenizer, EVAL_SEED) if first else None
        return held_out.take(0, held_out.size or 0) if held_out else []
    dataset = load_data(source, "test", ordered, tokenizer, EVAL_SEED, cwd)
    return dataset.take(0, min(problems, dataset.size or problems))


def rows_behind(examples: Sequence[Example]) -> list[Row]:
    """Return the rows that examples are made of."""
    rows = []
    for example in examples:
        name, number, _ = example.id.rsplit("/", 2)
        number = number.partition(".")[0]  # of a turn
        rows.append(Row(int(number), f"{name}:{number}", example.row, example.source))
    return rows


def load_set(spec: Spec, name: str, tokenizer: Tokenizer, cwd: Path) -> list[Example]:
    """Return the problems of a set of `eval.sets`, the same for every run. Raises SpecError."""
    settings = spec.eval.sets[name]
    data = data_of_set(spec, name)
    try:
        return load_eval(data, tokenizer, settings.problems or spec.eval.problems, cwd, spec.env)
    except SpecError as error:
        place = f"eval.sets.{name}.data"
        raise SpecError(f"{error.problem}", key=place, hint=error.hint) from error


def data_of_set(spec: Spec, name: str) -> Data:
    """Return the section `data` that a set of `eval.sets` is read with."""
    settings = spec.eval.sets[name]
    keys: dict[str, Any] = {
        key: value for key in ("prompt_key", "answer_key") if (value := getattr(settings, key)) is not None
    }
    if not settings.data.startswith(GENERATED):
        keys |= {"args": {}, "python": None}
    if settings.data in TASKS or settings.data.startswith(GENERATED):
        keys |= {"streaming": False}
    return structs.replace(spec.data, train=settings.data, eval=settings.data, **keys)


def prompt_value_of(row: Row, data: Data) -> str | list[dict[str, Any]]:
    """Return the prompt as the row has it: a text or, behind data.system, messages."""
    value = prompt_of(row, data)
    return value if isinstance(chat_in(value), str) else with_system(data, messages_of(value, row))


def refuse_for_plain(data: Data, tokenizer: Tokenizer) -> None:
    """Raise SpecError for keys that only chat templates read, where the model has none."""
    if not tokenizer.has_chat_template:
        _refuse_for_chats(data, _NO_TEMPLATE)


def _refuse_for_chats(data: Data, why: str) -> None:
    for key in ("system", "chat_template_kwargs"):
        if getattr(data, key):
            raise SpecError(f"{why}, so that nothing would read it", key=f"data.{key}", hint="Leave it out.")
