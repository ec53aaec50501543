"""What a spec says by itself that cannot be meant, and what is allowed and probably not meant. Pure."""

from lorad.errors import SpecError
from lorad.spec.model import Spec


def refuse_contradictions(spec: Spec) -> None:
    """Raise SpecError for settings that contradict each other."""
    trainer = spec.trainer
    if trainer.min_lr > trainer.lr:
        raise SpecError(
            f"{trainer.min_lr:g} is more than trainer.lr {trainer.lr:g}, so that the rate would rise",
            key="trainer.min_lr",
            hint="It is where linear and cosine end: lower it, or raise trainer.lr.",
        )


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
        "k2 and k3 do": kl.coef > 0 and kl.type == "k1",
        f"algorithm.kl.reference: {kl.reference} has no effect while algorithm.kl.coef is 0": (
            kl.reference is not None and not kl.coef
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
