"""Sample a version on rows through the daemon, as a run samples a set of `eval.sets`, and score that."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lorad.bounds import COMPLETIONS, POOL_TOKENS, PROMPT_TOKENS
from lorad.client.client import Client
from lorad.driver.evals.evaluate import summary
from lorad.driver.rewards import Rewarder, Score
from lorad.driver.sampling.generate import seeds_of
from lorad.driver.session import Plan
from lorad.errors import Conflict, SpecError
from lorad.evaluation.episodes import played
from lorad.files import expanded
from lorad.models.facts import read_facts
from lorad.protocol.evals import Evaluated, Wanted
from lorad.records.requests import Sampling
from lorad.records.runs import RunDetails
from lorad.records.versions import Completion
from lorad.rl.data import EVAL_SEED, Example, data_of_set, load_set, rows_behind
from lorad.rl.doubts import refuse_contradictions
from lorad.rl.reward import renamed
from lorad.rl.rows.doubts import are_chats, row_doubts
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import SIDES, labels_of
from lorad.spec.kept import Checkpoint
from lorad.spec.model import Spec, convert, fitted
from lorad.spec.reward import RewardSpec, rewards_of

_SECONDS = 24 * 3600.0  # for the completions of a batch, a pool that starts included
_AT_ONCE = 256  # prompts of one request
_SET = "data"  # the name of the set that is evaluated


def evaluate(request: Wanted) -> Evaluated:
    """Evaluate a version. Raises SpecError for impossible settings, and what the daemon raises."""
    client = Client(timeout=_SECONDS)
    serving = client.serving(request.version)
    details = client.show(serving.run)
    model = Path(serving.model_path)
    name = f"{serving.run}@{serving.version}"
    spec = fitted(_spec(details, request), read_facts(model).max_positions)
    eval_set = spec.eval.sets[_SET]
    tokenizer = Tokenizer(model)
    examples = load_set(spec, _SET, tokenizer, Path(request.cwd))
    if are_chats(spec, data := data_of_set(spec, _SET), tokenizer):
        for doubt in row_doubts("data", rows_behind(examples), data, None):
            print(f"warning: {doubt}", file=sys.stderr, flush=True)
    cwd = Path(request.cwd if eval_set.reward is not None or request.env else details.cwd or request.cwd)
    sampling = Sampling(
        n=eval_set.n,
        temperature=eval_set.temperature,
        top_p=eval_set.top_p if eval_set.temperature else 1.0,
        top_k=eval_set.top_k if eval_set.temperature else 0,
        max_new_tokens=eval_set.max_new_tokens or spec.rollout.max_new_tokens,
        stop=spec.rollout.stop,
    )
    settings = msgspec.to_builtins(replace(eval_set, max_new_tokens=sampling.max_new_tokens))
    if spec.env.name is not None:
        settings = {key: value for key, value in settings.items() if key != "reward"} | {"env": spec.env.name}
        groups = [*played(client, name, spec, tokenizer, examples, sampling, cwd)]
        completions = [[Completion(s.text, s.tokens.tolist(), s.finish) for s in group] for group in groups]
        scores = [sample.episode.score for group in groups for sample in group if sample.episode]
        tokenizer.close()
    else:
        tokenizer.close()
        rewards = rewards_of(spec.reward if eval_set.reward is None else eval_set.reward)
        settings["reward"] = msgspec.to_builtins([*rewards])
        with Rewarder(rewards, cwd) as rewarder:
            lacking = rewarder.lacking(examples[0].row, has_answers=bool(examples[0].answer))
            for function, missing in lacking.items():
                raise Conflict(
                    f"{function} needs {', '.join(missing)}, which the data does not have",
                    hint=f"{renamed(missing)}Give another --reward, or --answer-key.",
                )
            completions = [*_completed(client, name, examples, sampling)]
            scores = _scores(rewarder, examples, completions, tokenizer)
    by_problem = [scores[start : start + eval_set.n] for start in range(0, len(scores), eval_set.n)]
    if request.out:
        _write(Path(request.cwd, request.out), examples, completions, by_problem)
    result = summary(eval_set.n, eval_set.pass_at, [[score.value for score in group] for group in by_problem])
    metrics = ({} if result.score is None else {"score": result.score}) | result.passed
    return Evaluated(
        version=name, settings=settings, metrics=metrics, problems=result.problems, failed=result.failed
    )


def _spec(details: RunDetails, request: Wanted) -> Spec:
    """Return the run's spec with one set, which has the settings of the request. Raises SpecError.

    Rows of a source that says itself how it is judged are judged so; data.eval goes before data.train.
    """
    spec = convert(details.spec)
    if not request.env:
        data = request.settings["data"]
        file = Path(request.cwd, expanded(data)).resolve()
        labels = {side: labels_of(getattr(spec.data, side)) for side in reversed(SIDES)}
        for side, source in ((side, source) for side, sources in labels.items() for source in sources):
            if data == source or file == Path(details.cwd or request.cwd, expanded(source)).resolve():
                spec = spec.of_sources.get((side, labels[side][source]), spec)
                break
    plain = msgspec.to_builtins(replace(spec, checkpoint=Checkpoint()))
    if request.env:
        plain |= {"env": plain["env"] | {"name": request.env}, "reward": msgspec.to_builtins(RewardSpec())}
    name = request.env or spec.env.name
    if name is not None and request.settings.get("reward") is not None:
        hint = "Leave it out."
        raise SpecError(f"episodes of {name} have the reward that it gives", key="--reward", hint=hint)
    try:
        spec = convert(plain | {"eval": {"every": 1, "sets": {_SET: request.settings}}, "expect": []})
        refuse_contradictions(spec)
    except SpecError as error:  # of an option, not of a key
        key, hint = (text.replace(f"eval.sets.{_SET}.", "--") for text in (error.path, error.hint))
        raise SpecError(error.problem, key=key, hint=hint) from None
    return spec


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
        batch = examples[first : first + step]
        numbers = [[seed(0) for seed in own] for own in seeds[first : first + step]]
        answer = client.complete(version, [example.tokens for example in batch], numbers, sampling)
        print(f"{first + len(batch)} of {len(examples)} problems", file=sys.stderr, flush=True)
        for start in range(0, len(answer.completions), sampling.n):
            yield answer.completions[start : start + sampling.n]


def _scores(
    rewarder: Rewarder,
    examples: Sequence[Example],
    completions: Sequence[Sequence[Completion]],
    tokenizer: Tokenizer,
) -> list[Score]:
    to_score = [
        [
            example.for_reward(
                sample.text,
                sample.finish or "length",
                sample.tokens,
                tokenizer.decode(sample.tokens, skip_special=False) if rewarder.wants_raw else "",
            )
            for sample in group
        ]
        for example, group in zip(examples, completions, strict=True)
    ]
    return rewarder.begin(to_score).scores()


def _write(
    path: Path,
    examples: Sequence[Example],
    completions: Sequence[Sequence[Completion]],
    scores: Sequence[Sequence[Score]],
) -> None:
    """Write JSON lines, one for each completion."""
    lines = [
        {"problem": place, "index": index, "prompt": example.prompt, "answer": example.answer}
        | {
            "completion": completion.text,
            "finish": completion.finish,
            "reward": score.value,
            "error": score.error,
        }
        for place, (example, group, earned) in enumerate(zip(examples, completions, scores, strict=True), 1)
        for index, (completion, score) in enumerate(zip(group, earned, strict=True))
    ]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
