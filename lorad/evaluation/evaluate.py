"""Sample a version on rows through the daemon, as a run samples a set of `eval.sets`, and score that."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from lorad.bounds import COMPLETIONS, POOL_TOKENS, PROMPT_TOKENS
from lorad.client.client import Client
from lorad.driver.evals.evaluate import summary
from lorad.driver.rewards import Rewarder, Score
from lorad.driver.sampling.generate import seeds_of
from lorad.driver.session import Plan, Sample
from lorad.errors import Conflict, SpecError
from lorad.evaluation.episodes import played
from lorad.models.facts import read_facts
from lorad.protocol.evals import Evaluated, Wanted
from lorad.records.requests import Sampling
from lorad.records.versions import Completion
from lorad.rl.data import EVAL_SEED, Example, data_of_set, load_set, rows_behind
from lorad.rl.doubts import refuse_contradictions
from lorad.rl.reward import renamed
from lorad.rl.rows.doubts import are_chats, row_doubts
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.kept import Checkpoint
from lorad.spec.model import Spec, convert, fitted
from lorad.spec.reward import RewardSpec, rewards_of

_SECONDS = 24 * 3600.0  # for the completions of a batch, a pool that starts included
_AT_ONCE = 256  # prompts of one request
_SET = "data"  # the name of the set that is evaluated


def evaluate(wanted: Wanted) -> Evaluated:
    """Evaluate a version. Raises SpecError for settings, rows and rewards that cannot be, and what the daemon
    raises.
    """
    client = Client(timeout=_SECONDS)
    serving = client.serving(wanted.version)
    details = client.show(serving.run)
    model = Path(serving.model_path)
    name = f"{serving.run}@{serving.version}"
    spec = fitted(_spec(details.spec, wanted), read_facts(model).max_positions)
    one = spec.eval.sets[_SET]
    tokenizer = Tokenizer(model)
    examples = load_set(spec, _SET, tokenizer, Path(wanted.cwd))
    if are_chats(spec, data := data_of_set(spec, _SET), tokenizer):
        for doubt in row_doubts("data", rows_behind(examples), data, None):
            print(f"warning: {doubt}", file=sys.stderr, flush=True)
    cwd = Path(wanted.cwd if one.reward is not None or wanted.env else details.cwd or wanted.cwd)
    sampling = Sampling(
        n=one.n,
        temperature=one.temperature,
        top_p=one.top_p if one.temperature else 1.0,
        top_k=one.top_k if one.temperature else 0,
        max_new_tokens=one.max_new_tokens or spec.rollout.max_new_tokens,
        stop=spec.rollout.stop,
    )
    used = replace(one, max_new_tokens=sampling.max_new_tokens)
    settings = msgspec.to_builtins(used)
    if spec.env.name is not None:
        settings = {key: value for key, value in settings.items() if key != "reward"} | {"env": spec.env.name}
        groups = [*played(client, name, spec, tokenizer, examples, sampling, cwd)]
        made = [[_of_episode(sample) for sample in some] for some in groups]
        scores = [sample.episode.score for some in groups for sample in some if sample.episode]
        tokenizer.close()
    else:
        tokenizer.close()
        rewards = rewards_of(spec.reward if one.reward is None else one.reward)
        settings["reward"] = msgspec.to_builtins([*rewards])
        with Rewarder(rewards, cwd) as rewarder:
            _refuse_lacking(rewarder, examples[0])
            made = [*_completed(client, name, examples, sampling)]
            to_score = [
                [
                    e.for_reward(
                        sample.text,
                        sample.finish or "length",
                        sample.tokens,
                        tokenizer.decode(sample.tokens, skip_special=False) if rewarder.wants_raw else "",
                    )
                    for sample in some
                ]
                for e, some in zip(examples, made, strict=True)
            ]
            scores = rewarder.begin(to_score).scores()
    by_problem = [scores[start : start + one.n] for start in range(0, len(scores), one.n)]
    if wanted.out:
        _write(Path(wanted.cwd, wanted.out), examples, made, by_problem)
    found = summary(one.n, one.pass_at, [[score.value for score in some] for some in by_problem])
    return Evaluated(
        version=name,
        settings=settings,
        metrics=({} if found.score is None else {"score": found.score}) | found.passed,
        problems=found.problems,
        failed=found.failed,
    )


def _spec(given: dict[str, Any], wanted: Wanted) -> Spec:
    """Return the run's spec with one set, which has the settings that are wanted.

    Raises SpecError for settings that cannot be.
    """
    spec = convert(given)
    plain = msgspec.to_builtins(replace(spec, checkpoint=Checkpoint()))
    if wanted.env:
        plain |= {"env": plain["env"] | {"name": wanted.env}, "reward": msgspec.to_builtins(RewardSpec())}
    name = wanted.env or spec.env.name
    if name is not None and wanted.settings.get("reward") is not None:
        raise SpecError(
            f"episodes of {name} have the reward that it gives", key="--reward", hint="Leave it out."
        )
    try:
        spec = convert(plain | {"eval": {"every": 1, "sets": {_SET: wanted.settings}}, "expect": []})
        refuse_contradictions(spec)
    except SpecError as error:  # of an option, not of a key
        key, hint = (text.replace(f"eval.sets.{_SET}.", "--") for text in (error.path, error.hint))
        raise SpecError(error.problem, key=key, hint=hint) from None
    return spec


def _refuse_lacking(rewarder: Rewarder, first: Example) -> None:
    """Raises SpecError where the rows lack what the reward asks for."""
    for name, missing in rewarder.lacking(first.row, has_answers=bool(first.answer)).items():
        raise Conflict(
            f"{name} needs {', '.join(missing)}, which the data does not have",
            hint=f"{renamed(missing)}Give another --reward, or --answer-key.",
        )


def _completed(
    client: Client, version: str, examples: Sequence[Example], sampling: Sampling
) -> Iterator[list[Completion]]:
    """Yield the completions of each example, in order; the seeds are those that a run would take."""
    seeds = seeds_of(EVAL_SEED, Plan(0, [*examples], 0, 0, 0), sampling.n)
    longest = max(len(example.tokens) for example in examples)
    most = min(COMPLETIONS, POOL_TOKENS // sampling.max_new_tokens) // sampling.n
    most = min(_AT_ONCE, PROMPT_TOKENS // longest, most)
    step = max(1, most)
    for first in range(0, len(examples), step):
        some = examples[first : first + step]
        numbers = [[seed(0) for seed in own] for own in seeds[first : first + step]]
        answer = client.complete(version, [example.tokens for example in some], numbers, sampling)
        print(f"{first + len(some)} of {len(examples)} problems", file=sys.stderr, flush=True)
        for start in range(0, len(answer.completions), sampling.n):
            yield answer.completions[start : start + sampling.n]


def _of_episode(sample: Sample) -> Completion:
    return Completion(sample.text, sample.tokens.tolist(), sample.finish)


def _write(
    path: Path,
    examples: Sequence[Example],
    made: Sequence[Sequence[Completion]],
    scores: Sequence[Sequence[Score]],
) -> None:
    """Write JSON lines, one for each completion."""
    lines = [
        {"problem": place, "index": index, "prompt": example.prompt, "answer": example.answer}
        | {"completion": one.text, "finish": one.finish, "reward": score.value, "error": score.error}
        for place, (example, some, earned) in enumerate(zip(examples, made, scores, strict=True), 1)
        for index, (one, score) in enumerate(zip(some, earned, strict=True))
    ]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
