"""Load and try the user code of environments and evaluations, on first rows and made-up completions."""

import os
from collections.abc import Sequence
from pathlib import Path

from lorad.envs.child import EpisodeAnswer
from lorad.envs.format import Format
from lorad.envs.host import EnvironmentHost
from lorad.envs.programs import Programs, is_program
from lorad.envs.protocol import Turn
from lorad.envs.rendered import open_format
from lorad.envs.tools import result_of
from lorad.errors import SpecError
from lorad.preflight.answers import Sampling, answer_doubts
from lorad.preflight.rewards import open_rewards, pattern_doubts, try_rewards
from lorad.records.episodes import Task
from lorad.rl.data import Example, data_of_set, load_set, rows_behind
from lorad.rl.generated.environment import described
from lorad.rl.reward import renamed
from lorad.rl.rows.doubts import are_chats, row_doubts
from lorad.rl.tasks import TASKS
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.env import EnvSpec
from lorad.spec.model import Spec
from lorad.spec.reward import rewards_of

_UNSET = (
    "Give it to the daemon, in its environment or by `secrets` of config.yaml; your shell's does not count. "
    "Where several users share the daemon, it is a file of yours: ~/.config/lorad/secrets/{}, mode 0600."
)


def refuse_unset(names: Sequence[str], key: str) -> None:
    """Raise SpecError where a variable that user code needs is not set."""
    if unset := [name for name in names if name not in os.environ]:
        raise SpecError(
            f"{', '.join(unset)} is not set where runs work", key=key, hint=_UNSET.format(unset[0])
        )


def open_env(env: EnvSpec, cwd: Path) -> EnvironmentHost | Programs | None:
    """Return what plays episodes, not started. Raises SpecError for what is missing on disk."""
    if env.name is None:
        return None
    return Programs(env, cwd) if is_program(env, cwd) else EnvironmentHost(env, cwd)


def check_sets(spec: Spec, tokenizer: Tokenizer, cwd: Path) -> list[str]:
    """Check that the problems of each set of `eval.sets` have what its reward asks for.

    Raises SpecError. Returns warnings about their rows.
    """
    warnings = list[str]()
    for name in spec.eval.sets if spec.eval.every else ():
        examples = load_set(spec, name, tokenizer, cwd)
        data = data_of_set(spec, name)
        first = examples[0]
        if are_chats(spec, data, tokenizer):
            warnings += row_doubts(f"eval.sets.{name}.data", rows_behind(examples), data, None)
        if spec.env.name is not None:
            check_env(spec, first, tokenizer, cwd)
            continue
        suite = spec.eval.sets[name]
        key = f"eval.sets.{name}.reward"
        rewards = rewards_of(spec.reward if suite.reward is None else suite.reward)
        sampled = Sampling(suite.max_new_tokens or spec.rollout.max_new_tokens, spec.rollout.stop)
        rows = [] if suite.data in TASKS else rows_behind(examples)
        warnings += answer_doubts(f"eval.sets.{name}.data", rows, data, rewards, sampled, tokenizer)
        for reward in rewards:
            refuse_unset(reward.env, f"{key}.env")
        stops = spec.rollout.stop
        with open_rewards(rewards, cwd) as rewarder:
            warnings += pattern_doubts(rewards, stops, tokenizer, key)
            lacking = rewarder.lacking(first.row, has_answers=bool(first.answer))
            if not lacking:
                warnings += try_rewards(rewarder, [first], tokenizer, stops, key, suite.n, 1.0)
        for reward_name, missing in lacking.items():
            other = f"Name another reward, or the column of answers in eval.sets.{name}.answer_key."
            raise SpecError(
                f"{reward_name} needs {', '.join(missing)}, which the data of {name} does not have",
                key=key,
                hint=f"{renamed(missing)}{other}",
            )
    return warnings


def check_env(spec: Spec, example: Example, tokenizer: Tokenizer, cwd: Path) -> None:
    """Check that the environment begins well and answers two episodes of a row alike, or that a program
    loads.

    Raises SpecError.
    """
    env = spec.env
    refuse_unset(env.pass_env, "env.pass_env")
    form = open_format(spec, tokenizer)
    host = open_env(env, cwd)
    assert host is not None
    if isinstance(host, Programs):
        _check_program(spec, form, host)
        if env.package and tokenizer.call_form is None and described(env, cwd).has_tools:
            raise SpecError(
                f"{env.name} offers tools, and lorad does not know how this model writes calls of tools",
                key="env.name",
                hint="Use a model with a form of calls, such as Qwen's, or an environment without tools.",
            )
        return
    if env.concurrency > 1:
        raise SpecError(
            f"{env.name} is a class, and a process asks one of its environments at a time",
            key="env.concurrency",
            hint="Leave it out, and raise env.workers; several at a time are for agent programs.",
        )
    try:
        host.start()
        task = Task(example.row, spec.seed)
        both, begun = zip(*host.begin([task, task]), strict=True)
        answer = _alike(begun, "reset", env.name)
        messages = answer.messages
        if messages is None:
            raise _wrong(env.name, "reset returned an Observation without messages, so nothing is to be done")
        _, tokens = form.first(messages, answer.tools)
        if answer.tools:
            form.following([result_of(answer.tools[0]["function"]["name"], "1")])
        if len(tokens) + spec.rollout.max_new_tokens > (env.max_tokens or 0):
            raise SpecError(
                f"the first observation has {len(tokens)} tokens, and with a turn of "
                f"{spec.rollout.max_new_tokens} it exceeds {env.max_tokens}",
                key="env.max_tokens",
                hint="Raise it, or lower rollout.max_new_tokens.",
            )
        for heard in both:
            heard.turns.append(Turn("", "stop"))
        said = _alike(host.answers(both), "step", env.name).messages
        if said is not None:
            form.following(said)
    finally:
        host.close()


def _check_program(spec: Spec, form: Format, programs: Programs) -> None:
    """Check what an agent program asks of a run, and load it. Raises SpecError."""
    if spec.deterministic is not False:
        raise SpecError(
            f"{spec.env.name} is an agent program, whose episodes cannot be made again",
            key="deterministic",
            hint="Write `deterministic: false`, or an environment with reset and step.",
        )
    if not form.is_chat:
        raise SpecError(
            f"{spec.env.name} is an agent program, which speaks in chats",
            key="env.format",
            hint="Use a model with a chat template, and leave env.format out.",
        )
    try:
        if not spec.env.package:  # its rows were read, so that it can be loaded
            programs.start()
    finally:
        programs.close()


def _alike(answers: Sequence[EpisodeAnswer], verb: str, name: str | None) -> EpisodeAnswer:
    """Return what both episodes were answered. Raises SpecError."""
    first, second = answers
    if first.error:
        raise SpecError(first.error, key="env.name", hint="Mend the file.")
    if (first.messages, first.reward, first.tools) != (second.messages, second.reward, second.tools):
        raise _wrong(name, f"{verb} answered two episodes of one row otherwise, with equal turns")
    return first


def _wrong(name: str | None, problem: str) -> SpecError:
    hint = "An environment is a function of its row and the turns so far; see docs/environments.md."
    return SpecError(f"{name}: {problem}", key="env.name", hint=hint)
