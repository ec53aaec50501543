"""Every metric that a step of a run may have, and what it is.

Docs, `lorad metrics`, the dashboard's curves and `expect` of a spec read it. A figure that was not measured
is absent, never 0. Seconds are wall time. Means are over samples or tokens of the step. What data and code of
users name (`reward/NAME`) is in NAMED, by its beginning.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

from msgspec import Struct

from lorad.spec.algorithm import Kind

_Better = Literal["", "higher", "lower"]


class Metric(Struct, frozen=True):
    """One figure of a step.

    title: what it is, with its unit.
    about: over what it is taken, and where it is measured.
    better: which values are better; "" where that depends.
    kinds: the kinds of algorithms whose steps have it; empty where all have.
    of_machine: whether it is about the machine rather than about what is learnt.
    """

    title: str
    about: str = ""
    better: _Better = ""
    kinds: tuple[Kind, ...] = ()
    of_machine: bool = False


_machine = partial(Metric, of_machine=True)
_rl = partial(Metric, kinds=("rl",))
_preference = partial(Metric, kinds=("preference",))
_OF_ALL = {
    "loss": Metric("loss", "The mean over updates, of the tokens that were trained on.", better="lower"),
    "lr": Metric("learning rate", "Of the last update of the step."),
    "entropy": Metric("entropy, nats per token", "Over the tokens that were trained on, before the update."),
    "grad_norm": Metric("gradient norm", "The mean over updates, before it is clipped."),
    "updates": Metric("optimizer steps"),
    "skipped_updates": Metric("updates that were skipped", "Loss or gradient was not finite."),
    "skipped_updates_total": Metric("updates that were skipped in the run so far"),
    "idle_steps_total": Metric("steps that changed no weight in the run so far"),
    "tokens": _machine(
        "tokens that were sampled", "Of sft, preferences and tinker all tokens, also of prompts."
    ),
    "trained_tokens": _machine("tokens that were trained on", "Tokens with a loss, once for each pass."),
    "tokens_per_second": _machine(
        "tokens per second, engine",
        "Of sft and preferences tokens of the step by its training time.",
        "higher",
    ),
    "trainer_tokens_per_second": _machine(
        "tokens per second, trainer", "Over the time that it computed, prompts included.", "higher"
    ),
    "trainer_memory": _machine("memory of the trainer after the step, bytes", "On all of its devices."),
    "trainer_memory_peak": _machine("memory of the trainer at most, bytes", "On all of its devices."),
    "mfu": _machine("share of the devices' peak FLOP/s", "Where the peak is known.", "higher"),
    "host_cpu": _machine("share of all cores that was busy, other programs included"),
    "host_memory": _machine("memory in use on the machine, bytes"),
    "device_utilization": _machine("share of the time in which the GPUs computed", "The mean over them."),
    "device_memory": _machine("memory in use on the GPUs, bytes"),
    "device_power": _machine("watts of the GPUs"),
    "seconds": _machine("seconds of the step"),
    "seconds_train": _machine("seconds of passes and updates"),
    "seconds_publish": _machine("seconds until the new version was loaded and attested"),
    "seconds_attest": _machine("seconds of attestation", "A part of `seconds_publish`."),
    "seconds_checkpoint": _machine("seconds of writing a checkpoint", "In steps that wrote one."),
    "seconds_waited": _machine("seconds that calls waited for their turn in the pool"),
    "policy_change": Metric(
        "distance from the base, nats per token", "Root mean square over canary tokens, by the trainer."
    ),
    "policy_step": Metric("distance from the version before, nats per token", "As `policy_change`."),
    "adapter_norm": Metric("Frobenius norm of scale × B A over all modules"),
}

_OF_SAMPLES = {
    "reward": _rl("reward", "The mean over the samples that have one.", "higher"),
    "reward_std": _rl("standard deviation of the reward"),
    "reward_min": _rl("least reward"),
    "reward_max": _rl("greatest reward"),
    "reward_best": _rl("best reward of a group", "The mean over groups."),
    "failed_rewards": _rl("samples whose reward failed"),
    "failed_rewards_total": _rl("samples whose reward failed in the run so far"),
    "response_length": _rl("response length, tokens", "The mean over all samples."),
    "response_length_min": _rl("shortest response, tokens"),
    "response_length_max": _rl("longest response, tokens"),
    "truncated": _rl("share of samples that a limit of length ended"),
    "zero_variance_groups": _rl("groups whose rewards are all equal", "None with a critic."),
    "distinct": _rl("share of samples of a group that no other one equals", "The mean over groups."),
    "empty": _rl("share of samples without any visible text"),
    "repetition": _rl("share of runs of four tokens that stood in the same sample before"),
    "special_inside": _rl("share of completions with a special token before their last one"),
    "ratio": _rl("ratio of the probabilities of trainer and old policy", "The mean over tokens."),
    "clip_fraction": _rl("share of ratios that were clipped"),
    "kl": _rl("KL to the reference, nats per token", "Where `algorithm.kl.coef` is more than 0."),
    "kl_coef": _rl("coefficient of the KL penalty", "Where `algorithm.kl.target` adapts it."),
    "rejected": _rl("share of tokens that `algorithm.correction` leaves out"),
    "importance_capped": _rl("share of tokens whose importance weight the cap bounds"),
    "importance_max": _rl("greatest importance weight of trainer against engine"),
    "staleness": _rl("age of the weights that sampled, updates"),
    "staleness_difference": _rl(
        "difference of trainer and engine with what older weights add, nats per token",
        "Where samples are of older weights.",
    ),
    "logprob_difference": _rl(
        "logprob mismatch, engine to trainer", "Mean of |trainer − engine|, nats per token, of equal weights."
    ),
    "logprob_difference_max": _rl("largest mismatch of a token, nats"),
    "routes_differ": _rl(
        "share of tokens that the trainer would have sent to other experts", "Where routes are replayed."
    ),
    "routes_unknown": _rl("share of computed tokens whose route is not known", "Where routes are replayed."),
    "prompts_sampled": _rl("prompts sampled for the step", "With dynamic sampling."),
    "prompts_used": _rl("prompts among them whose rewards differ", "With dynamic sampling."),
    "prompts_easy": _rl("prompts that are known to be easy", "With `data.difficulty`."),
    "prompts_hard": _rl("prompts that are known to be hard", "With `data.difficulty`."),
    "turns": _rl("turns of an episode"),
    "rows": _rl("rows of an episode", "Where any episode forks."),
    "observation_tokens": _rl("tokens of an episode that its environment said"),
    "tool_calls": _rl("calls of tools in an episode"),
    "tool_errors": _rl("calls of tools that could not be made, in an episode"),
    "seconds_env": _rl("seconds that the environment took of an episode"),
    "seconds_sample": _rl("seconds that the loop waited for samples"),
    "seconds_sampling": _rl("seconds that samples took, perhaps meanwhile"),
    "seconds_score": _rl("seconds that the loop waited for scores"),
    "seconds_scoring": _rl("seconds from the first sample to the last score", "With code of yours."),
    "seconds_weigh": _rl("seconds of advantages and log-probabilities"),
    "explained_variance": _rl(
        "share of the returns' variance that the critic's values have", "Of ppo, before its update.", "higher"
    ),
    "value": _rl("value of a sample at its beginning, by the critic", "Of ppo; compare it with the reward."),
    "value_loss": _rl("loss of the critic", "Of ppo, the mean over its updates.", "lower"),
    "value_clip_fraction": _rl("share of tokens whose value clip acted", "Of ppo."),
    "critic_grad_norm": _rl("gradient norm of the critic", "Of ppo."),
}

_OF_PAIRS = {
    "pair_accuracy": _preference("share of pairs whose chosen one has the larger reward", better="higher"),
    "reward_margin": _preference("reward of chosen minus rejected completions", better="higher"),
    "chosen_reward": _preference(
        "reward of chosen completions", "β × (logprob − reference), as TRL's `rewards/chosen`."
    ),
    "rejected_reward": _preference("reward of rejected completions", "As `chosen_reward`."),
    "chosen_shift": _preference("logprob − reference of chosen completions, nats per token"),
    "rejected_shift": _preference("logprob − reference of rejected completions, nats per token"),
    "chosen_logprob": _preference("logprob of chosen completions, nats per token", "Of simpo."),
    "rejected_logprob": _preference("logprob of rejected completions, nats per token", "Of simpo."),
}

_OF_CHATS = {
    "perplexity": Metric("perplexity of the completions", kinds=("sft",), better="lower"),
    "token_accuracy": Metric("share of tokens that are the likeliest", kinds=("sft",), better="higher"),
    "held_out_loss": Metric("loss on held-out rows", kinds=("sft", "preference"), better="lower"),
    "held_out_nll": Metric(
        "negative log-likelihood of held-out completions, nats per token",
        kinds=("sft", "preference"),
        better="lower",
    ),
    "held_out_perplexity": Metric("perplexity of held-out completions", kinds=("sft",), better="lower"),
    "held_out_token_accuracy": Metric(
        "share of held-out tokens that are the likeliest", kinds=("sft", "preference"), better="higher"
    ),
}

METRICS: Mapping[str, Metric] = {
    **_OF_ALL,
    **_OF_SAMPLES,
    **_OF_CHATS,
    **_OF_PAIRS,
    **{
        f"held_out_{name}": _preference(f"{metric.title}, on held-out rows", better=metric.better)
        for name, metric in _OF_PAIRS.items()
    },
    "on_request": Metric("1: a client asked for the step", kinds=("tinker",)),
}

NAMED: Mapping[str, Metric] = {
    "reward/": _rl("a component of the reward", "The mean over the samples that have it.", "higher"),
    "reward_of/": _rl("reward of a source of rows", better="higher"),
    "env/": _rl("what the environment measured", "The mean over the episodes that have it."),
    "cost/": _rl("what rewards counted, as the calls and tokens of a judge", "The sum over the step."),
}

EVALS: Mapping[str, Metric] = {
    "eval": Metric("held-out eval", "The mean reward of held-out problems.", better="higher"),
    "eval/": Metric("eval of a set of `eval.sets`, and its pass@k", better="higher"),
    "nll": Metric("negative log-likelihood of held-out completions, nats per token", better="lower"),
    "accuracy": Metric("share of held-out pairs that are the right way round", better="higher"),
}
_EXPLAINED = {**METRICS, **NAMED, **EVALS}


def metric_of(name: str) -> Metric | None:
    """Return what a metric is; None for one that lorad does not know."""
    return _EXPLAINED.get(name) or _EXPLAINED.get(name[: name.find("/") + 1])
