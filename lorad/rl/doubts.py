"""What a spec says by itself that cannot be meant, and what is allowed and probably not meant. Pure."""

from lorad.errors import SpecError
from lorad.spec.model import Spec
from lorad.spec.user_code import UserCode


def refuse_contradictions(spec: Spec) -> None:
    """Raise SpecError for settings that contradict each other."""
    trainer = spec.trainer
    if trainer.min_lr > trainer.lr:
        raise SpecError(
            f"{trainer.min_lr:g} is more than trainer.lr {trainer.lr:g}, so that the rate would rise",
            key="trainer.min_lr",
            hint="It is where linear and cosine end: lower it, or raise trainer.lr.",
        )
    algorithm, parts = spec.algorithm, spec.algorithm.parts
    for key, reason in algorithm.without_effect.items():
        if getattr(algorithm, key) is not None:
            raise SpecError(
                f"it has no effect with algorithm {algorithm.name}: {reason}",
                key=f"algorithm.{key}",
                hint="Leave it out, or choose the surrogate and ratio that it belongs to.",
            )
    _refuse_beside_functions(spec)
    for key, least, most in (
        ("bounds", *parts.bounds),
        ("negative_bounds", *(parts.negative_bounds or (0, 0))),
        ("correction.low", *((c.low, c.high) if (c := algorithm.correction) else (0, 0))),
    ):
        if least > most:
            raise SpecError(
                f"{least:g} is more than {most:g}", key=f"algorithm.{key}", hint="Name the least first."
            )
    if algorithm.correction is not None and algorithm.importance_cap is not None:
        raise SpecError(
            "it weighs the mismatch of trainer and engine a second time",
            key="algorithm.importance_cap",
            hint=f"correction: {{kind: token_truncate, high: {algorithm.importance_cap:g}}} is the same.",
        )
    given = [key for key in ("importance_cap", "correction") if getattr(algorithm, key) is not None]
    if given and parts.surrogate == "nll":
        raise SpecError(
            "the surrogate nll has no importance weights", key=f"algorithm.{given[0]}", hint="Leave it out."
        )
    if given and parts.anchor == "sampler":
        raise SpecError(
            "with anchor sampler the ratio weighs the mismatch of trainer and engine already",
            key=f"algorithm.{given[0]}",
            hint="Leave it out, or choose anchor old.",
        )
    kind = algorithm.correction.kind if algorithm.correction else ""
    if kind and (parts.surrogate == "dro" or (parts.ratio == "geometric" and kind.startswith("token"))):
        raise SpecError(
            f"{kind} cannot weigh the loss of surrogate {parts.surrogate} with ratio {parts.ratio}",
            key="algorithm.correction",
            hint="Choose another surrogate, or the correction sequence_mask with ratio geometric.",
        )
    if parts.baseline == "loo" and parts.scale in ("std", "batch_std"):
        raise SpecError(
            f"a baseline of the others divided by {parts.scale} grows without bound where rewards are nearly "
            "equal",
            key="algorithm.scale",
            hint="Choose scale one with baseline loo, or baseline group.",
        )
    _refuse_settings_of_rl(spec)
    has_gradient = parts.baseline in ("zero", "moving") or parts.scale == "whiten"
    if algorithm.drop_zero_variance and has_gradient and not algorithm.advantage:
        raise SpecError(
            f"with baseline {parts.baseline} and scale {parts.scale} groups of equal rewards have a gradient",
            key="algorithm.drop_zero_variance",
            hint="Leave it out.",
        )


def _refuse_beside_functions(spec: Spec) -> None:
    """Refuse what does not fit a loss or an advantage of the user's. Raises SpecError."""
    algorithm = spec.algorithm
    if not (algorithm.loss or algorithm.advantage):
        if algorithm.name == "custom":
            raise SpecError(
                "custom names neither a loss nor an advantage",
                key="algorithm.name",
                hint="Give algorithm.loss or algorithm.advantage as path/to/file.py:function, or name grpo.",
            )
        if algorithm.user_code != UserCode():
            raise SpecError(
                "there is no function that it would limit",
                key="algorithm.user_code",
                hint="Leave it out, or give algorithm.loss or algorithm.advantage.",
            )
    given = [key for key in ("loss", "advantage") if getattr(algorithm, key)]
    if given and algorithm.parts.surrogate == "nll":
        raise SpecError(
            "the surrogate nll raises the likelihood of samples that it picks, and has neither loss nor "
            "advantage to replace",
            key=f"algorithm.{given[0]}",
            hint="Choose algorithm custom, or leave it out.",
        )
    if not algorithm.loss:
        return
    for key in ("importance_cap", "correction", "drop_zero_variance"):
        if getattr(algorithm, key):
            raise SpecError(
                "algorithm.loss is given all samples as they are, and weighs them itself",
                key=f"algorithm.{key}",
                hint="Leave it out; the loss has `sampler`, `old` and `advantages` to do the same.",
            )
    if spec.lora.dropout:
        raise SpecError(
            "algorithm.loss sees log-probabilities without dropout, and its derivative holds for these alone",
            key="lora.dropout",
            hint="Leave it out, or use a surrogate of lorad's.",
        )


def _refuse_settings_of_rl(spec: Spec) -> None:
    """Raise SpecError for settings of samples, groups and penalties that have no effect or no meaning."""
    algorithm, kl = spec.algorithm, spec.algorithm.kl
    is_nll = algorithm.parts.surrogate == "nll"
    in_reward = algorithm.kl_place == "reward"
    updates = algorithm.epochs * algorithm.minibatches
    for key, reason, hint, holds in (
        (
            "algorithm.group_size",
            f"a group of one is never better than its own mean, the baseline of {algorithm.name}",
            "Choose 2 or more, or algorithm.baseline zero or moving.",
            algorithm.group_size < 2
            and algorithm.has_baseline
            and not (is_nll and algorithm.least is not None),
        ),
        (
            "lora.dropout",
            f"{updates} updates of a step compare log-probabilities, which dropout changes by itself",
            "Set it to 0, or algorithm.epochs and minibatches to 1.",
            spec.lora.dropout > 0 and updates > 1,
        ),
        (
            "algorithm.kl.type",
            f"{kl.type} is of a penalty in the loss; in the reward it is k1",
            "Leave it out, or set algorithm.kl.where to loss.",
            in_reward and kl.type not in (None, "k1"),
        ),
        (
            "algorithm.kl.where",
            "the surrogate nll reads no reward",
            "Set it to loss.",
            in_reward and is_nll and kl.coef > 0,
        ),
        (
            "algorithm.kl.target",
            "there is no coefficient to adapt while algorithm.kl.coef is 0",
            "Set algorithm.kl.coef to where it begins.",
            kl.target is not None and not kl.coef,
        ),
        (
            "algorithm.truncated",
            "a masked sample is not looked at, so that its KL penalty is not known",
            "Choose keep or penalise, or algorithm.kl.where loss.",
            algorithm.truncated == "mask" and in_reward and kl.coef > 0,
        ),
        (
            "algorithm.dynamic_sampling",
            "without a baseline of the group each group has a gradient",
            "Leave it out, or set its `keep`.",
            algorithm.refill is not None
            and algorithm.refill.keep is None
            and not (algorithm.has_baseline or algorithm.advantage),
        ),
        (
            "algorithm.best",
            "only the surrogate nll picks samples",
            "Leave it out, or choose algorithm rft.",
            algorithm.best is not None and not is_nll,
        ),
        (
            "algorithm.least",
            "only the surrogate nll picks samples",
            "Leave it out, or choose algorithm rft.",
            algorithm.least is not None and not is_nll,
        ),
    ):
        if holds:
            raise SpecError(reason, key=key, hint=hint)


def doubts(spec: Spec) -> list[str]:
    """Warnings, each of which begins with its key."""
    trainer, algorithm, kl = spec.trainer, spec.algorithm, spec.algorithm.kl
    horizon = trainer.steps if trainer.schedule == "constant" else trainer.schedule_steps or trainer.steps
    prompts = spec.data.prompts_per_step
    found = {
        f"trainer.warmup_steps: {trainer.warmup_steps} is more than the {trainer.steps} steps of the run, "
        "whose rate never comes to trainer.lr": trainer.warmup_steps > trainer.steps,
        f"trainer.schedule_steps: {trainer.schedule} ends at step {horizon}, so that later steps, up to "
        f"{trainer.steps}, are made at trainer.min_lr {trainer.min_lr:g}": horizon < trainer.steps,
        "algorithm.kl.type: k1 has no gradient in the mean, so kl.coef holds nothing back; "
        "k2 and k3 do": kl.coef > 0 and kl.type == "k1" and algorithm.kl_place == "loss",
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
    return [text for text, holds in found.items() if holds]


def _truncation(spec: Spec) -> str:
    rollout = spec.rollout
    keys = {"rollout.top_p": rollout.top_p < 1, "rollout.top_k": rollout.top_k > 0}
    return " and ".join(key for key, is_given in keys.items() if is_given)
