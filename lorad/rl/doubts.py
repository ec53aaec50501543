"""What a spec says by itself that cannot be meant, and what is allowed and probably not meant. Pure."""

import re
from collections.abc import Callable, Iterator
from itertools import chain

from lorad.errors import SpecError
from lorad.rl.expectations import eval_metrics, wrong_expectations
from lorad.rl.generated.sources import refuse_judges, refuse_rows
from lorad.rl.idle import idle_keys
from lorad.rl.tasks import TASKS
from lorad.spec.algorithm import Algorithm, Kind
from lorad.spec.data import MADE, Data, single
from lorad.spec.env import EnvSpec
from lorad.spec.kept import MAIN
from lorad.spec.model import Spec
from lorad.spec.reward import RewardSpec, rewards_of
from lorad.spec.user_code import UserCode

_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_TAKEN = (MAIN, "score", "nll", "accuracy")
_MOST_SETS = 32
_COLDEST = 0.01  # below, scores divided by it overflow


def refuse_contradictions(spec: Spec) -> None:
    """Raise SpecError for settings that contradict each other."""
    of_all = (
        _of_rate,
        _of_stream,
        _of_env,
        refuse_rows,
        refuse_judges,
        _of_eval,
        _of_best,
        idle_keys,
        wrong_expectations,
    )
    kinds = (*of_all, *_OF_KIND[spec.algorithm.kind])
    for error in chain.from_iterable(kind(spec) for kind in kinds):
        raise error


def _of_rate(spec: Spec) -> Iterator[SpecError]:
    trainer = spec.trainer
    if trainer.lr is not None and trainer.min_lr > trainer.lr:
        problem = f"{trainer.min_lr:g} is more than trainer.lr {trainer.lr:g}, so that the rate would rise"
        hint = "It is where linear and cosine end: lower it, or raise trainer.lr."
        yield SpecError(problem, key="trainer.min_lr", hint=hint)


def _of_stream(spec: Spec) -> Iterator[SpecError]:
    data = spec.data
    source = single(spec.data.train)
    if not data.streaming:
        if data.buffer != Data().buffer:
            hint = "Add data.streaming, or leave it out."
            yield SpecError("nothing is streamed", key="data.buffer", hint=hint)
        return
    if not source or source in TASKS or source.startswith(MADE):
        problem = "data.train is not one hub dataset or one file, which alone are streamed"
        hint = "Leave it out: these rows are read before training."
        yield SpecError(problem, key="data.streaming", hint=hint)
    if spec.algorithm.kind == "preference":
        yield SpecError(
            f"{spec.algorithm.name} computes the reference's log-probabilities of all rows before it trains",
            key="data.streaming",
            hint="Leave it out.",
        )


def _of_env(spec: Spec) -> Iterator[SpecError]:
    env = spec.env
    task = TASKS.get(single(spec.data.train))
    if task is not None and task.env is not None and env.name is None:
        problem = f"its rows are for the environment {task.env}: their prompts alone have no answer"
        yield SpecError(problem, key="data.train", hint=f"Add `env: {task.env}`, or train on another task.")
    if env.name is None:
        if env != EnvSpec():
            yield SpecError("nothing is played", key="env", hint="Give env.name, or leave `env` out.")
        return
    if spec.algorithm.kind != "rl":
        problem = f"{spec.algorithm.name} trains on the completions of the data, and plays nothing"
        hint = "Leave `env` out, or choose an algorithm that samples, such as grpo."
        yield SpecError(problem, key="env.name", hint=hint)
    if spec.rewards != [RewardSpec()]:
        hint = "Leave it out, and let the environment compute it."
        yield SpecError(f"the environment {env.name} gives the reward of an episode", key="reward", hint=hint)


def _of_eval(spec: Spec) -> Iterator[SpecError]:
    """Yield errors of held-out problems that are named, timed or sampled as they cannot be."""
    every = spec.eval.every
    if len(spec.eval.sets) > _MOST_SETS:
        yield SpecError(
            f"{len(spec.eval.sets)} sets are more than {_MOST_SETS}", key="eval.sets", hint="Leave some out."
        )
    for name in [name for name in ("sets", "stop") if getattr(spec.eval, name) and not every]:
        hint = "Leave it out, or set eval.every."
        yield SpecError("eval.every is 0, so that nothing is evaluated", key=f"eval.{name}", hint=hint)
    for name, settings in spec.eval.sets.items():
        key = f"eval.sets.{name}"
        if name in _TAKEN or not _SET_NAME.fullmatch(name):
            why = "is a figure of the main evaluation" if name in _TAKEN else "is no name for a set"
            hint = "Choose letters, digits, dot, dash and underscore, at most 40."
            yield SpecError(f"{name[:80]} {why}", key="eval.sets", hint=hint)
        if settings.every and every and settings.every % every:
            problem = f"{settings.every} is no multiple of eval.every, {every}"
            hint = f"Set it to {-(-settings.every // every) * every}, or change eval.every."
            yield SpecError(problem, key=f"{key}.every", hint=hint)
        if settings.n > 1 and not settings.temperature:
            problem = f"{settings.n} completions at temperature 0 are all the same"
            hint = f"Set {key}.temperature, for example to {spec.rollout.temperature:g}."
            yield SpecError(problem, key=f"{key}.n", hint=hint)
        if 0 < settings.temperature < _COLDEST:
            problem = f"{settings.temperature:g} is neither greedy nor a temperature"
            yield SpecError(problem, key=f"{key}.temperature", hint=f"Set it to 0, or to {_COLDEST} or more.")
        task = TASKS.get(settings.data)
        if task is not None and task.env is not None and spec.env.name is None:
            yield SpecError(
                f"its rows are for the environment {task.env}", key=f"{key}.data", hint="Choose another task."
            )
        curves = [reward.curve for reward in rewards_of(settings.reward or [])]
        if twice := sorted({curve for curve in curves if curves.count(curve) > 1}):
            yield SpecError(
                f"two rewards are called {twice[0]}", key=f"{key}.reward", hint="Give one another label."
            )
        if settings.reward is not None and spec.env.name is not None:
            problem = f"the environment {spec.env.name} gives the reward of an episode"
            yield SpecError(problem, key=f"{key}.reward", hint="Leave it out.")


def _of_best(spec: Spec) -> Iterator[SpecError]:
    """Yield errors where the best version cannot be found by what is asked for."""
    checkpoint = spec.checkpoint
    if (checkpoint.keep_best or checkpoint.best_by) and not spec.eval.every:
        key = "checkpoint.keep_best" if checkpoint.keep_best else "checkpoint.best_by"
        hint = "Leave it out, or set eval.every."
        yield SpecError("eval.every is 0, so that no version is the best", key=key, hint=hint)
    metrics = eval_metrics(spec)
    if checkpoint.best_by is not None and checkpoint.best_by not in metrics:
        problem = f"{checkpoint.best_by[:80]} is not measured by this run"
        yield SpecError(problem, key="checkpoint.best_by", hint=f"Choose one of: {', '.join(metrics)}.")


def _of_parts(spec: Spec) -> Iterator[SpecError]:
    algorithm = spec.algorithm
    parts = spec.algorithm.parts
    for key, reason in algorithm.without_effect.items():
        if getattr(algorithm, key) is not None:
            problem = f"it has no effect with algorithm {algorithm.name}: {reason}"
            hint = "Leave it out, or choose the surrogate and ratio that it belongs to."
            yield SpecError(problem, key=f"algorithm.{key}", hint=hint)
    for key, least, most in (
        ("bounds", *parts.bounds),
        ("negative_bounds", *(parts.negative_bounds or (0, 0))),
        ("dynamic_sampling.keep", *((d.keep or (0, 0)) if (d := algorithm.dynamic_sampling) else (0, 0))),
        ("correction.low", *((c.low, c.high) if (c := algorithm.correction) else (0, 0))),
    ):
        if least > most:
            yield SpecError(
                f"{least:g} is more than {most:g}", key=f"algorithm.{key}", hint="Name the least first."
            )
    updates = algorithm.epochs * algorithm.minibatches
    if spec.lora.dropout > 0 and updates > 1:
        problem = f"{updates} updates of a step compare log-probabilities, which dropout changes by itself"
        hint = "Set it to 0, or algorithm.epochs and algorithm.minibatches to 1."
        yield SpecError(problem, key="lora.dropout", hint=hint)


def _of_functions(spec: Spec) -> Iterator[SpecError]:
    """Yield errors of what does not fit a loss or an advantage of the user's."""
    algorithm = spec.algorithm
    named = [key for key in ("loss", "advantage") if getattr(algorithm, key)]
    if not named and algorithm.name == "custom":
        hint = "Give algorithm.loss or algorithm.advantage as path/to/file.py:function, or name grpo."
        yield SpecError("custom names neither a loss nor an advantage", key="algorithm.name", hint=hint)
    if not named and algorithm.user_code != UserCode():
        hint = "Leave it out, or give algorithm.loss or algorithm.advantage."
        yield SpecError("there is no function that it would limit", key="algorithm.user_code", hint=hint)
    if named and (algorithm.parts.surrogate == "nll" or algorithm.name == "distill"):
        what = "distill" if algorithm.name == "distill" else "the surrogate nll"
        problem = f"{what} weighs tokens in its own way, which a function cannot replace"
        hint = "Choose algorithm custom, or leave it out."
        yield SpecError(problem, key=f"algorithm.{named[0]}", hint=hint)
    if algorithm.advantage and algorithm.has_critic:
        hint = "Leave it out, or choose an algorithm without a critic."
        yield SpecError("the critic makes the advantages", key="algorithm.advantage", hint=hint)
    for key in ("importance_cap", "correction", "drop_zero_variance"):
        if algorithm.loss and getattr(algorithm, key):
            problem = "algorithm.loss is given all samples as they are, and weighs them itself"
            hint = "Leave it out; the loss has `sampler`, `old` and `advantages` to do the same."
            yield SpecError(problem, key=f"algorithm.{key}", hint=hint)
    if algorithm.loss and spec.lora.dropout:
        yield SpecError(
            "algorithm.loss sees log-probabilities without dropout, and its derivative holds for these alone",
            key="lora.dropout",
            hint="Leave it out, or use a surrogate of lorad's.",
        )


def _of_preference(spec: Spec) -> Iterator[SpecError]:
    if spec.lora.dropout > 0:
        problem = "the coefficients of dpo are of log-probabilities, which dropout changes by itself"
        yield SpecError(problem, key="lora.dropout", hint="Set it to 0.")
    if spec.algorithm.preference.loss == "kto" and spec.data.prompts_per_step < 2:
        problem = "kto compares each completion with the prompts of other rows of the step"
        yield SpecError(problem, key="data.prompts_per_step", hint="Set it to 2 or more.")


def _of_weights(spec: Spec) -> Iterator[SpecError]:
    """Yield errors of importance weights of trainer and engine that are given twice or do nothing."""
    algorithm = spec.algorithm
    parts = spec.algorithm.parts
    named = [key for key in ("importance_cap", "correction") if getattr(algorithm, key) is not None]
    if len(named) == 2 and algorithm.importance_cap is not None:
        problem = "it weighs the mismatch of trainer and engine a second time"
        hint = f"correction: {{kind: token_truncate, high: {algorithm.importance_cap:g}}} is the same."
        yield SpecError(problem, key="algorithm.importance_cap", hint=hint)
    if named and parts.surrogate == "nll":
        yield SpecError(
            "the surrogate nll has no importance weights", key=f"algorithm.{named[0]}", hint="Leave it out."
        )
    if named and parts.anchor == "sampler":
        problem = "with anchor sampler the ratio weighs the mismatch of trainer and engine already"
        yield SpecError(problem, key=f"algorithm.{named[0]}", hint="Leave it out, or choose anchor old.")
    kind = algorithm.correction.kind if algorithm.correction else ""
    if kind and (parts.surrogate == "dro" or (parts.ratio == "geometric" and kind.startswith("token"))):
        problem = f"{kind} cannot weigh the loss of surrogate {parts.surrogate} with ratio {parts.ratio}"
        hint = "Choose another surrogate, or the correction sequence_mask with ratio geometric."
        yield SpecError(problem, key="algorithm.correction", hint=hint)


def _of_samples(spec: Spec) -> Iterator[SpecError]:
    """Yield errors of settings of groups and of what is trained on in them."""
    algorithm = spec.algorithm
    parts = spec.algorithm.parts
    is_nll = parts.surrogate == "nll"
    if parts.baseline == "loo" and parts.scale in ("std", "batch_std"):
        yield SpecError(
            f"a baseline of the others divided by {parts.scale} grows without bound where rewards are nearly "
            "equal",
            key="algorithm.scale",
            hint="Choose scale one with baseline loo, or baseline group.",
        )
    is_centred = parts.baseline not in ("zero", "moving", "critic") and parts.scale != "whiten"
    if algorithm.drop_zero_variance and not is_centred and not algorithm.advantage:
        yield SpecError(
            f"with baseline {parts.baseline} and scale {parts.scale} groups of equal rewards have a gradient",
            key="algorithm.drop_zero_variance",
            hint="Leave it out.",
        )
    if algorithm.group_size < 2 and algorithm.has_baseline and algorithm.least is None:
        problem = f"a group of one is never better than its own mean, the baseline of {algorithm.name}"
        hint = "Choose 2 or more, or algorithm.baseline zero or moving."
        yield SpecError(problem, key="algorithm.group_size", hint=hint)
    compares = algorithm.has_baseline or algorithm.advantage
    if algorithm.refill is not None and algorithm.refill.keep is None and not compares:
        problem = "without a baseline of the group each group has a gradient"
        yield SpecError(problem, key="algorithm.dynamic_sampling", hint="Leave it out, or set its `keep`.")
    for key in ("best", "least"):
        if getattr(algorithm, key) is not None and not is_nll:
            hint = "Leave it out, or choose algorithm rft."
            yield SpecError("only the surrogate nll picks samples", key=f"algorithm.{key}", hint=hint)


def _of_penalties(spec: Spec) -> Iterator[SpecError]:
    """Yield errors of settings of the KL penalty."""
    algorithm = spec.algorithm
    kl = spec.algorithm.kl
    in_reward = algorithm.kl_place == "reward"
    if in_reward and kl.type not in (None, "k1"):
        problem = f"{kl.type} is of a penalty in the loss; in the reward it is k1"
        hint = "Leave it out, or set algorithm.kl.where to loss."
        yield SpecError(problem, key="algorithm.kl.type", hint=hint)
    if in_reward and algorithm.kl_coef and algorithm.parts.surrogate == "nll":
        yield SpecError("the surrogate nll reads no reward", key="algorithm.kl.where", hint="Set it to loss.")
    if in_reward and algorithm.kl_coef and algorithm.truncated == "mask":
        problem = "a masked sample is not looked at, so that its KL penalty is not known"
        hint = "Choose keep or penalise, or algorithm.kl.where loss."
        yield SpecError(problem, key="algorithm.truncated", hint=hint)
    if kl.reset_every and (not algorithm.has_reference or algorithm.name == "distill"):
        yield SpecError(
            "the teacher of distill stays"
            if algorithm.kl_coef
            else "no KL is measured: algorithm.kl.coef is 0",
            key="algorithm.kl.reset_every",
            hint="Leave it out, or choose another algorithm with a coefficient.",
        )
    if kl.target is not None and not algorithm.kl_coef:
        problem = "there is no coefficient to adapt while algorithm.kl.coef is 0"
        yield SpecError(problem, key="algorithm.kl.target", hint="Set algorithm.kl.coef to where it begins.")


def _of_teachers(spec: Spec) -> Iterator[SpecError]:
    """Yield errors of settings of a teacher."""
    algorithm = spec.algorithm
    kl = spec.algorithm.kl
    has_teacher = algorithm.teacher is not None or kl.reference is not None
    if algorithm.name == "distill" and not (has_teacher and algorithm.kl_coef):
        yield SpecError(
            "distill needs a teacher",
            key="algorithm.kl.coef" if has_teacher else "algorithm.kl.reference",
            hint="Name a version (run@number), a PEFT directory or algorithm.teacher, with a coefficient.",
        )
    if algorithm.teacher is not None and algorithm.name != "distill":
        hint = "Leave it out, or choose algorithm distill."
        yield SpecError(f"{algorithm.name} has no teacher", key="algorithm.teacher", hint=hint)
    if algorithm.teacher is not None and kl.reference == "start":
        problem = f"start is an adapter of the run's own model, not of {algorithm.teacher}"
        hint = "Leave it out, or name a version (run@number) or a PEFT directory of the teacher's model."
        yield SpecError(problem, key="algorithm.kl.reference", hint=hint)
    if algorithm.name == "distill" and algorithm.kl_place == "loss":
        yield SpecError(
            "the teacher of distill is in the reward", key="algorithm.kl.where", hint="Leave it out."
        )
    if algorithm.reward_coef is not None and algorithm.name != "distill":
        problem = "it is the weight of the reward beside the teacher of distill"
        yield SpecError(problem, key="algorithm.reward_coef", hint="Leave it out.")


def _of_critics(spec: Spec) -> Iterator[SpecError]:
    """Yield errors of settings of a critic."""
    algorithm = spec.algorithm
    parts = spec.algorithm.parts
    warmup = spec.algorithm.critic.warmup_steps
    if not algorithm.has_critic:
        for key in ("gamma", "lam", "value_clip", "critic"):
            if getattr(algorithm, key) != getattr(Algorithm(), key):
                problem = f"algorithm {algorithm.name} has baseline {parts.baseline}, which needs no critic"
                hint = "Leave it out, or choose algorithm ppo."
                yield SpecError(problem, key=f"algorithm.{key}", hint=hint)
        return
    if parts.scale not in ("whiten", "one"):
        problem = f"advantages of a critic belong to tokens, which have no {parts.scale} of a group"
        yield SpecError(problem, key="algorithm.scale", hint="Choose whiten or one.")
    if parts.surrogate == "nll":
        problem = "the surrogate nll has no advantage that a critic could estimate"
        yield SpecError(problem, key="algorithm.surrogate", hint="Choose clip, or algorithm rft.")
    if algorithm.name == "distill":
        problem = "the teacher of distill takes the place of a critic"
        yield SpecError(problem, key="algorithm.baseline", hint="Leave it out, or choose algorithm ppo.")
    if warmup >= spec.trainer.steps:
        problem = f"{warmup} leave nothing of the {spec.trainer.steps} steps for the policy"
        hint = "Lower it, or raise trainer.steps."
        yield SpecError(problem, key="algorithm.critic.warmup_steps", hint=hint)


_OF_KIND: dict[Kind, tuple[Callable[[Spec], Iterator[SpecError]], ...]] = {
    "rl": (_of_functions, _of_parts, _of_weights, _of_samples, _of_penalties, _of_teachers, _of_critics),
    "sft": (),
    "preference": (_of_preference,),
    "tinker": (),
}


def doubts(spec: Spec) -> list[str]:
    """Return warnings, each of which begins with its key."""
    trainer = spec.trainer
    algorithm = spec.algorithm
    kl = spec.algorithm.kl
    horizon = trainer.steps if trainer.schedule == "constant" else trainer.schedule_steps or trainer.steps
    prompts = spec.data.prompts_per_step
    warnings = {
        f"trainer.warmup_steps: {trainer.warmup_steps} is more than the {trainer.steps} steps of the run, "
        "whose rate never comes to trainer.lr": trainer.warmup_steps > trainer.steps,
        f"trainer.schedule_steps: {trainer.schedule} ends at step {horizon}, so that later steps, up to "
        f"{trainer.steps}, are made at trainer.min_lr {trainer.min_lr:g}": horizon < trainer.steps,
        "algorithm.kl.type: k1 has no gradient in the mean, so kl.coef holds nothing back; "
        "k2 and k3 do": algorithm.kl_coef > 0 and kl.type == "k1" and algorithm.kl_place == "loss",
        f"algorithm.kl.reference: {kl.reference} has no effect while algorithm.kl.coef is 0": (
            kl.reference is not None and not algorithm.has_reference
        ),
        f"algorithm.name: {algorithm.name} has the gradient of grpo at the same level here: with one update "
        "a step and no staleness every ratio is 1": (
            algorithm.name in ("gspo", "gmpo", "cispo", "sapo")
            and not algorithm.loss
            and algorithm.epochs == algorithm.minibatches == 1
            and not spec.rollout.max_staleness
        ),
        f"algorithm.minibatches: {algorithm.minibatches} is more than the {prompts} of "
        f"data.prompts_per_step; an epoch has {prompts}, of one prompt each": algorithm.minibatches > prompts,
        f"{_truncation(spec)}: samples come from a truncated distribution, but all log-probabilities are of "
        "the whole one: importance ratios leave the truncation out, and the gradient favours what is likely "
        "already; top_p 1 and top_k 0 sample what is trained": bool(_truncation(spec)),
    }
    return [text for text, holds in warnings.items() if holds]


def _truncation(spec: Spec) -> str:
    rollout = spec.rollout
    keys = {"rollout.top_p": rollout.top_p < 1, "rollout.top_k": rollout.top_k > 0}
    return " and ".join(key for key, is_given in keys.items() if is_given)
