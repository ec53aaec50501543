"""Try rewards: load them, and call them on made-up completions of the first rows."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from re import _constants as of_pattern  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from msgspec.structs import replace

from lorad.driver.rewards import Rewarder
from lorad.errors import SpecError
from lorad.preflight.rows import JudgedRows
from lorad.preflight.telling import begin
from lorad.rl.data import Example, rows_behind
from lorad.rl.reward import OF_TRL, SAMPLE_KEYS, RewardInput, renamed
from lorad.rl.rows.columns import find_value
from lorad.rl.rows.doubts import listed
from lorad.rl.sources import Row
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data
from lorad.spec.reward import RewardSpec
from lorad.text import some_of

_SECONDS = 10.0  # for all functions together
_LIMIT = 8.0  # seconds of a coroutine or a judge
_MADE_UP = "Made up by lorad to try the reward."
_SHOWN = 60  # characters of a completion
_REPEATED = (of_pattern.MAX_REPEAT, of_pattern.MIN_REPEAT, of_pattern.POSSESSIVE_REPEAT)
_ZERO_WIDTH = (of_pattern.AT, of_pattern.ASSERT, of_pattern.ASSERT_NOT)
_FORMS = (
    'A function of lists gets [{"role": "assistant", "content": …}] for each completion where prompts are '
    "messages, and text where they are text; one of a sample gets text. See docs/rewards.md."
)


def check_reward(judged: JudgedRows, tokenizer: Tokenizer, cwd: Path) -> tuple[bool, list[str]]:
    """Load the reward, look at what it asks of the rows, and have it score made-up completions.

    Raises SpecError. Returns whether samples of these examples have a reward, and warnings. Held-out
    completions need no reward, so that one that is not given may lack something.
    """
    spec = judged.spec
    examples = judged.first
    is_rl = spec.algorithm.kind == "rl"
    stops = spec.rollout.stop
    with open_rewards(spec.rewards, cwd) as rewarder:
        warnings = pattern_doubts(spec.rewards, stops, tokenizer, "reward")
        rewarder.start()
        if not examples:
            return is_rl, warnings
        row = examples[0].row
        lacking = rewarder.lacking(row, has_answers=judged.has_answers)
        if is_rl and not lacking:
            for rows in (judged.rows, rows_behind(judged.held_out)):
                warnings += _refuse_lacking(rewarder, rows, spec.data)
        if not lacking:
            warnings += [
                f"reward: {name} gets what lorad calls {', '.join(columns)}, not the column of that name; "
                "rename the column"
                for name, columns in rewarder.hidden(row).items()
            ]
            most = spec.max_failures if is_rl else 1.0
            size = spec.algorithm.group_size
            warnings += try_rewards(rewarder, examples, tokenizer, stops, "reward", size, most)
    for name, missing in lacking.items() if is_rl or spec.rewards != [RewardSpec()] else ():
        present = sorted(SAMPLE_KEYS.union(row) - set(missing))
        hint = f"{renamed(missing)}There is {some_of(present)}; data.answer_key names the column of answers."
        if of_trl := sorted(OF_TRL.intersection(missing)):
            hint = f"Only TRL's trainer gives {', '.join(of_trl)}: let the function do without."
        raise SpecError(
            f"{name} needs {', '.join(missing)}, which the data does not have", key="reward", hint=hint
        )
    return not lacking, warnings


def _refuse_lacking(rewarder: Rewarder, rows: Sequence[Row], data: Data) -> list[str]:
    """Raise SpecError for a row without a column that a reward requires; return warnings about nulls."""
    has_answers = any(find_value(row, data, "answer_key") is not None for row in rows)
    required = rewarder.required
    seen = set[frozenset[str]]()
    nulls = dict[str, dict[tuple[str, int], str]]()
    for row in rows:
        for name, names in required.items():
            if null := [column for column in names if row.values.get(column, "") is None]:
                nulls.setdefault(name, {})[row.source, row.number] = f"{', '.join(null)} is null"
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
    return [f"data: {listed(words)}: {name} needs it, and is given None" for name, words in nulls.items()]


def open_rewards(rewards: Sequence[RewardSpec], cwd: Path) -> Rewarder:
    """Return the rewards as `try_rewards` calls them. Raises SpecError."""
    return Rewarder([replace(r, retries=0, timeout=min(r.timeout, _LIMIT)) for r in rewards], cwd)


def try_rewards(
    rewarder: Rewarder,
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    stops: Sequence[str],
    key: str,
    size: int,
    most_failures: float,
) -> list[str]:
    """Call each function of the user's, and a judge once, on completions that are made up for some rows.

    Raises SpecError where one fails on each, unless runs may go on without any reward; returns warnings about
    others.

    stops: the texts of rollout.stop.
    size: number of samples in a group.
    key: the key of the spec that an error names.
    """
    begin("trying the reward")
    groups = list[list[RewardInput]]()  # of equal completions
    for example in examples:  # the answer alone, the answer in the usual forms, and a sentence without it
        answer = example.answer or "1"
        tags = f"<think>\n{_MADE_UP}\n</think>\n<answer>{answer}</answer>"
        for text in (answer, f"{tags}\n\\boxed{{{answer}}}\n#### {answer}", _MADE_UP):
            ids = [*tokenizer.encode(text), *tokenizer.eos_ids[:1]]
            raw = tokenizer.decode(ids, skip_special=False)
            completion = tokenizer.completion(ids, stops)
            groups.append([example.for_reward(completion, "stop", ids, raw)] * size)
    warnings = list[str]()
    for name, tried in rewarder.try_out(groups, _SECONDS):
        if not tried:
            warnings.append(
                f"{key}: {name} has scored no made-up completion of the first rows within "
                f"{_SECONDS:g} s; a first call that loads a model has ten times reward.timeout in a run"
            )
            continue
        failed = [
            (sample, reply.error) for sample, reply in tried if reply.value is None and not reply.abstains
        ]
        if not failed:
            continue
        sample, error = failed[0]
        text = sample.completion
        shown = repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}…"
        failure = f"made-up completions of the first rows, such as {shown}: {error}"
        if len(failed) == len(tried) and most_failures < 1:
            problem = f"{name} fails on {failure}"
            raise SpecError(problem, key=key, hint=_FORMS if name != "judge" else "See docs/rewards.md.")
        warnings.append(
            f"{key}: {name} fails on {len(failed)} of {len(tried)} {failure}; "
            "in a run such a sample has no reward"
        )
    return warnings


def pattern_doubts(
    rewards: Sequence[RewardSpec], stops: Sequence[str], tokenizer: Tokenizer, key: str
) -> list[str]:
    """Return warnings about patterns of the rewards at `key` that match only text which no reward gets."""
    left_out = {text: f"the special token {text}" for text in tokenizer.special.values() if text}
    left_out |= {text: f"{text!r} of rollout.stop" for text in stops}
    return [
        f"{key}.pattern: {reward.pattern!r} matches only with {words}, and the text of a completion is "
        "without special tokens and without what stopped it, so that this reward is always 0; `raw: true` "
        "has regex read all of it"
        for reward in rewards
        if reward.name == "regex" and not reward.raw
        for text, words in left_out.items()
        if demands(reward.pattern or "", text)
    ]


def demands(pattern: str, text: str) -> bool:
    """Return whether whatever the pattern matches contains the text."""
    parsed = _parser.parse(pattern)
    return not parsed.state.flags & re.IGNORECASE and _demands(parsed, text)


def _demands(parsed: Any, text: str) -> bool:
    """Look for the text in characters that follow each other in every match, and in all branches of one."""
    run = ""
    for kind, value in _parts(parsed):
        run = run + value if kind is of_pattern.LITERAL else ""
        if text in run or (kind is of_pattern.BRANCH and all(_demands(branch, text) for branch in value)):
            return True
    return False


def _parts(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what every match has, in order: characters, branches, and other things that end a text."""
    for kind, value in parsed:
        if kind is of_pattern.LITERAL:
            yield kind, chr(value)
        elif kind is of_pattern.SUBPATTERN and not value[1] & re.IGNORECASE:
            yield from _parts(value[3])
        elif kind is of_pattern.ATOMIC_GROUP:
            yield from _parts(value)
        elif kind in _REPEATED:
            if value[0]:
                yield from _parts(value[2])
            yield kind, None
        elif kind is of_pattern.BRANCH:
            yield kind, value[1]
        elif kind not in _ZERO_WIDTH:
            yield kind, None
