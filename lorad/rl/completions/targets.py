"""Data that hold the completions to train on: rendered by prefix, tokenised, with a mask of what is trained.

`parts.py` says how chats become text. What is behind the last end token of a turn (a line break, in many
templates) is not trained. Where nothing follows what is said, as in plain text, an end token is added. Each
part is tokenised behind the parts before it, where the tokens of these stay the same, as they do at special
tokens; else by itself.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from lorad.errors import SpecError
from lorad.rl.completions.formats import ChatTurns, format_of, label_of, plain_of, turns_of
from lorad.rl.completions.parts import REWRITES, Part, cut_chats
from lorad.rl.completions.prefixes import Prefixes, shared
from lorad.rl.data import (
    EVAL_SEED,
    Dataset,
    Example,
    NoData,
    PreparedRows,
    RowDataset,
    Split,
    TaskDataset,
    chunks,
    load_data,
    load_eval,
    prompt_value_of,
    refuse_for_plain,
    with_answer,
)
from lorad.rl.generated.environment import environment_rows
from lorad.rl.kept.cache import CacheKey, key_of
from lorad.rl.kept.rows import Kept, Target
from lorad.rl.kept.summary import Summary
from lorad.rl.rows.columns import find_value, text_of, value_of
from lorad.rl.rows.messages import TRAINED_KEYS, with_system
from lorad.rl.rows.pairs import Judgement
from lorad.rl.rows.shown import unshown
from lorad.rl.rows.variables import variables_of
from lorad.rl.sources import Row, labelled, read_rows
from lorad.rl.streaming.reader import Reader, eval_rows, reader_of
from lorad.rl.tasks import TASKS
from lorad.rl.templates import Refused
from lorad.rl.tokenizer import Tokenizer, refusal
from lorad.spec.algorithm import Algorithm
from lorad.spec.data import Data, Sources, single
from lorad.spec.model import Spec

_Group = list[list[Part]]  # samples of one prompt


class TargetDataset(PreparedRows):
    """Rows that hold completions."""

    def __init__(
        self, sources: Sources, data: Data, tokenizer: Tokenizer, seed: int, algorithm: Algorithm
    ) -> None:
        super().__init__(sources, data, tokenizer, seed)
        self._algorithm = algorithm

    def judgements(self) -> Iterator[Judgement]:
        """Yield the preferences of the rows as they are trained."""
        for item in self._kept if self.stream is None else self.stream.in_memory():
            label = label_of(item.row, self._data) if self.form == "labels" else None
            yield Judgement(item.row, item.prompt, tuple(target.tokens for target in item.targets), label)

    def places(self, position: int, n: int) -> list[int]:
        """Return which rows in memory `take` returns, counted from 0."""
        return [self._order.place(index)[0] for index in range(position, position + n)]

    @property
    def lengths(self) -> np.ndarray:
        """Return how many tokens the completions of each row in memory have, int64 [rows]."""
        lengths = np.array(self.completion_lengths, np.int64)
        return np.asarray(lengths.reshape(len(self._kept), -1).sum(axis=1))

    @property
    def tokens_digest(self) -> str:
        """Return the sha256 (hex) of the tokens of all rows in memory."""
        digest = hashlib.sha256()
        for kept in self._kept:
            for tokens in (kept.prompt, *(target.tokens for target in kept.targets)):
                digest.update(tokens.size.to_bytes(8, "little") + tokens.astype("<i4").tobytes())
        return digest.hexdigest()

    def _example(self, kept: Kept, epoch: int) -> Example:
        data = self._data
        row = kept.row
        answer = value_of(row, data, "answer_key") if self.has_answers else ""
        name = f"{row.source or self._name}/{kept.name}/{epoch}"
        tokens = kept.prompt.tolist()
        prompt_value: str | list[dict[str, Any]] = kept.text
        if self._templated:
            has_prompt = bool(data.prompt_format) or find_value(row, data, "prompt_key") is not None
            if self.form != "messages" and has_prompt and isinstance(text := prompt_value_of(row, data), str):
                prompt_value = text
            else:
                turns = self._chats(row)[0]
                prompt_value = turns.messages[: turns.trained[int(kept.name.partition(".")[2] or 0)]]
        return Example(
            name,
            kept.text,
            text_of(answer),
            tokens,
            row.values,
            kept.targets,
            source=row.source,
            prompt_value=prompt_value,
            answer_value=answer,
        )

    def _prepare(self, rows: Iterable[Row]) -> Iterator[Kept]:
        prefixes = Prefixes(self._tokenizer, special=not self._templated)
        for chunk in chunks(rows):
            parted = self._parts(chunk)
            samples = [
                (row.where, parts)
                for row, groups in zip(chunk, parted, strict=True)
                for group in groups
                for parts in group
            ]
            places = [place for place, _ in samples]
            texts = ["".join(part.text for part in parts) for _, parts in samples]
            encoded = iter(self._tokenizer.encode_batch(texts, special=not self._templated, places=places))
            for row, groups in zip(chunk, parted, strict=True):
                self.split += len(groups) > 1
                for number, group in enumerate(groups):
                    name = f"{row.number}.{number}" if len(groups) > 1 else str(row.number)
                    targets = [self._target(row, parts, next(encoded), prefixes) for parts in group]
                    yield from self._group(row, name, group, targets)

    def _group(
        self, row: Row, name: str, group: _Group, tokenised: Sequence[tuple[np.ndarray, Target]]
    ) -> Iterator[Kept]:
        """Yield samples of one prompt unless they are too long."""
        prompt = tokenised[0][0]
        targets = tuple(target for _, target in tokenised)
        if group[0][0] != group[-1][0]:
            hint = "Both answer the same prompt."
            raise SpecError(f"{row.where}: chosen and rejected differ before the assistant's turn", hint=hint)
        if self.form == "labels":
            label_of(row, self._data)
        room = self._data.max_sample_tokens - prompt.size
        if any(target.tokens.size > room for target in targets):
            targets = tuple(Target(t.tokens[: max(room, 0)], t.trained[: max(room, 0)]) for t in targets)
            if self._data.too_long != "truncate" or not all(target.trained.any() for target in targets):
                self.dropped += 1
                return
            self.cut += 1
        yield Kept(row, name, group[0][0].text, prompt, targets)

    def _target(
        self, row: Row, parts: Sequence[Part], ids: list[int], prefixes: Prefixes
    ) -> tuple[np.ndarray, Target]:
        """Return a prompt and its target by the text's `ids`. Raises SpecError if nothing is trained."""
        ends = [*accumulate(len(part.text) for part in parts)]
        beginnings = prefixes.of("".join(part.text for part in parts), ids, ends)
        tokens = ids[: beginnings[0][0]] + beginnings[0][1]
        if not tokens:
            raise SpecError(f"{row.where}: the prompt is empty", hint="Every prompt has at least one token.")
        size = len(tokens)
        equal = shared(tokens, ids)
        trained = [False] * size
        eos = self._tokenizer.eos_ids
        for part, (first, more) in zip(parts[1:], beginnings[1:], strict=True):
            size_before = len(tokens)
            is_behind = (
                equal >= min(first, size_before) and more[: max(0, size_before - first)] == tokens[first:]
            )
            new = (
                [*ids[size_before:first], *more[max(0, size_before - first) :]]
                if is_behind
                else self._tokenizer.encode(part.text)
            )
            stops = [place + 1 for place, token in enumerate(new) if token in eos]
            behind = new[stops[-1] :] if stops else new
            if part.is_bare and not (
                stops and not self._tokenizer.decode(behind, skip_special=False).strip()
            ):
                new += eos[:1]
                stops += [len(new)] * bool(eos)
            learnt = (stops[-1] if stops else len(new)) if part.trained else 0
            self.unended += part.trained and not stops
            tokens += new
            trained += [True] * learnt + [False] * (len(new) - learnt)
            equal += shared(new, ids[size_before : size_before + len(new)]) if equal == size_before else 0
        if not any(trained):
            raise SpecError(
                f"{row.where}: no token of it is trained", hint="Every row has a turn of the assistant's."
            )
        end = len(trained) - trained[::-1].index(True)
        prompt = np.array(tokens[:size], np.int32)
        return prompt, Target(np.array(tokens[size:end], np.int32), np.array(trained[size:end]))

    def _parts(self, rows: Sequence[Row]) -> list[list[_Group]]:
        """Return the groups of each row. Raises SpecError."""
        if not self._templated:
            plain = [plain_of(row, self._data, self.form, self._why_plain) for row in rows]
            return [
                [[[Part(prompt, False), Part(text, True, True)] for text in completions]]
                for prompt, completions in plain
            ]
        chats = [(row, turns) for row in rows for turns in self._chats(row)]
        groups: dict[str, list[_Group]] = {row.where: [] for row in rows}
        most = self._data.max_sample_tokens
        cut = cut_chats(
            chats, self._texts, lambda prompts: min(map(len, self._tokenizer.encode_batch(prompts))) > most
        )
        for (row, turns), samples in zip(chats, cut, strict=True):
            groups[row.where].append(samples.parts)
            self.dropped += samples.left
            text = "".join(part.text for part in samples.parts[-1])
            trained = turns.trained[: len(turns.trained) - samples.left]
            self.keep_unshown(row, unshown(turns.messages, variables_of(row), text, trained))
        for row in rows:  # its chats side by side, or the samples of its only one, each alone
            its_chats = groups[row.where]
            if len(its_chats) > 1 and any(len(samples) > 1 for samples in its_chats):
                problem = f"{row.where}: {REWRITES}, so that several turns of a preference are no one sample"
                raise SpecError(problem, hint="Let chosen and rejected differ in their last turn alone.")
        return [
            [[samples[0] for samples in its]] if len(its) > 1 else [[sample] for sample in its[0]]
            for its in (groups[row.where] for row in rows)
        ]

    def _chats(self, row: Row) -> list[ChatTurns]:
        chats = []
        for turns in turns_of(row, self._data, self.form):
            messages = with_system(self._data, turns.messages)
            added = len(messages) - len(turns.messages)
            chats.append(ChatTurns(messages, [place + added for place in turns.trained], turns.left_out))
            if turns.left_out and not turns.trained:
                raise SpecError(
                    f"{row.where}: each turn of the assistant's says that it is not trained",
                    hint=f"Leave the row out, or one of {', '.join(TRAINED_KEYS)} of a turn.",
                )
            if not chats[-1].trained:
                roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
                raise SpecError(
                    f"{row.where}: no turn of it is the assistant's, so that nothing is trained; "
                    f"its roles are {roles}",
                    hint='The role of what is trained is "assistant".',
                )
            if chats[-1].trained[0] == 0:
                raise SpecError(
                    f"{row.where}: it begins with a turn of the assistant's, which answers nothing",
                    hint="Leave that turn out, or write what it answers before it; data.system is enough.",
                )
        return chats

    def _texts(self, chats: Sequence[tuple[Row, list[dict[str, Any]]]], generate: bool) -> list[str]:
        settings = self._data.chat_template_kwargs
        variables = dict[str, dict[str, Any]]()
        for row, _ in chats:
            if row.where not in variables:
                variables[row.where] = variables_of(row)
        own = [variables[row.where] for row, _ in chats]
        try:
            return self._tokenizer.chats([chat for _, chat in chats], settings, own, generate=generate)
        except Refused as error:
            raise refusal(error, chats[error.index][0].where) from error


class _TargetRows(TargetDataset):
    """Completions that are made ready before the run."""

    def __init__(
        self,
        sources: Sources,
        rows: Iterable[Row],
        data: Data,
        tokenizer: Tokenizer,
        seed: int,
        algorithm: Algorithm,
        key: CacheKey | None = None,
    ) -> None:
        """Check every row, unless they are kept under `key`. Raises SpecError, also when no row is left."""
        super().__init__(sources, data, tokenizer, seed, algorithm)
        summary = Summary(data)
        stream = iter(rows)

        def make() -> Iterator[Kept]:
            if (first := next(stream, None)) is None:
                raise SpecError(f"{self._name} has no row", key="data", hint="Add rows.")
            self.form = format_of(first, data, algorithm)
            return summary.of(self._prepare(chain([first], stream)))

        self.open_rows(key, make, summary)
        self.prompt_lengths = self._kept.prompt_lengths
        self.completion_lengths = self._kept.completion_lengths
        if not self._kept:
            left_out = f", {self.dropped} were too long" if self.dropped else ""
            hint = "Raise data.max_sample_tokens or add rows."
            raise SpecError(f"{self._name} has no usable row{left_out}", key="data", hint=hint)


class _TargetStream(TargetDataset):
    """Completions that are read while the run trains."""

    def __init__(
        self, source: str, reader: Reader, data: Data, tokenizer: Tokenizer, seed: int, algorithm: Algorithm
    ) -> None:
        super().__init__(source, data, tokenizer, seed, algorithm)
        self.open_stream(reader)

    def usable(self, rows: list[Row]) -> list[Kept]:
        if rows and self.form == "auto":
            self.form = format_of(rows[0], self._data, self._algorithm)
        return super().usable(rows)


def load_train(spec: Spec, tokenizer: Tokenizer, cwd: Path) -> Dataset:
    """Return what a run trains on. Raises SpecError."""
    data = spec.data
    kind = spec.algorithm.kind
    if kind == "tinker":
        return NoData()
    if kind == "rl" and spec.env.package:  # the prompts are the environment's own
        rows = environment_rows(spec.env, "train", cwd)
        return RowDataset(data.train, rows, data, tokenizer, spec.seed)
    if kind == "rl":
        return load_data(data.train, "train", data, tokenizer, spec.seed, cwd)
    if single(data.train) in TASKS and kind == "preference":
        problem = f"the task {data.train} has right answers and no wrong ones"
        hint = "Give a .jsonl or .parquet file, or a hub dataset, of preferences."
        raise SpecError(problem, key="data.train", hint=hint)
    if single(data.train) in TASKS:
        dataset = load_data(data.train, "train", data, tokenizer, spec.seed, cwd)
        assert isinstance(dataset, TaskDataset)
        dataset.trains_answers = True
        return dataset
    if data.streaming:
        refuse_for_plain(data, tokenizer)
        source = single(data.train)
        reader = reader_of(source, "train", cwd)
        return _TargetStream(source, reader, data, tokenizer, spec.seed, spec.algorithm)
    return _rows(data.train, "train", data, tokenizer, spec.seed, cwd, spec.algorithm)


def load_held_out(spec: Spec, tokenizer: Tokenizer, cwd: Path) -> list[Example]:
    """Return the held-out problems, see `load_eval`. Raises SpecError.

    Where completions are trained on, the problems have those of their data; rows without any are prompts.
    """
    data = spec.data
    kind = spec.algorithm.kind
    source = spec.data.eval
    if kind == "rl" or (source is None and single(data.train) not in TASKS and not data.streaming):
        return load_eval(data, tokenizer, spec.eval.problems, cwd, spec.env)
    ordered = structs.replace(data, shuffle=False)
    if data.streaming and (streamed := eval_rows(data, spec.eval.problems, cwd)) is not None:
        rows = [*streamed]
        if rows and data.eval and data.format == "auto" and not _has_targets(rows[0], data, spec.algorithm):
            return load_eval(data, tokenizer, spec.eval.problems, cwd)
        if not rows:
            return []
        dataset = _TargetRows(data.eval or data.train, rows, ordered, tokenizer, EVAL_SEED, spec.algorithm)
        return dataset.take(0, dataset.size or 0)
    if source is None or single(source) in TASKS:
        problems = load_eval(data, tokenizer, spec.eval.problems, cwd)
        return problems if kind == "preference" else [with_answer(e, tokenizer) for e in problems]
    first = next(labelled(source, lambda name: read_rows(name, "test", cwd)), None)
    if first is not None and data.format == "auto" and not _has_targets(first, data, spec.algorithm):
        return load_eval(data, tokenizer, spec.eval.problems, cwd)
    dataset = _rows(source, "test", ordered, tokenizer, EVAL_SEED, cwd, spec.algorithm)
    return dataset.take(0, min(spec.eval.problems, dataset.size or 0))


def _rows(
    source: Sources,
    split: Split,
    data: Data,
    tokenizer: Tokenizer,
    seed: int,
    cwd: Path,
    algorithm: Algorithm,
) -> _TargetRows:
    refuse_for_plain(data, tokenizer)
    rows = labelled(source, lambda name: read_rows(name, split, cwd))
    about = (split, str(algorithm.kind), str(algorithm.name), algorithm.preference.loss)
    key = key_of(source, data, tokenizer, cwd, *about)
    return _TargetRows(source, rows, data, tokenizer, seed, algorithm, key)


def _has_targets(row: Row, data: Data, algorithm: Algorithm) -> bool:
    try:
        format_of(row, data, algorithm)
    except SpecError:
        return False
    return True
