"""The section `algorithm`: what is trained on. `lorad/rl/` has the formulas."""

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from lorad.spec.numbers import Fraction, NonNegative, NonNegativeFloat, Part, Positive, PositiveFloat
from lorad.spec.user_code import UserCode

_Name = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce",
    "reinforce++",
    "reinforce++_baseline",
    "maxrl",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "dppo",
    "topr",
    "rft",
    "ppo",
    "distill",
    "custom",
    "sft",
    "dpo",
    "tinker",
]
Kind = Literal["rl", "sft", "preference", "tinker"]
PreferenceLoss = Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "apo_zero", "simpo", "kto"]
Baseline = Literal["group", "loo", "length", "zero", "moving", "critic"]
Scale = Literal["std", "batch_std", "mean", "whiten", "one"]
Ratio = Literal["token", "sequence", "geometric"]
Anchor = Literal["old", "sampler"]
Surrogate = Literal["clip", "weighted", "soft", "divergence", "dro", "nll"]
Level = Literal["token", "sequence", "prompt", "constant", "sum"]
KlType = Literal["k1", "abs", "k2", "k3", "k3+"]
CorrectionKind = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
]


class _Parts(Struct, frozen=True):
    """An algorithm. Fields are keys of `algorithm` in the spec."""

    baseline: Baseline = "group"
    scale: Scale = "std"
    surrogate: Surrogate = "clip"
    ratio: Ratio = "token"
    anchor: Anchor = "old"
    clip: tuple[float, float] = (0.2, 0.2)
    dual: float | None = None
    bounds: tuple[float, float] = (0.0, 5.0)
    negative_bounds: tuple[float, float] | None = None
    level: Level = "token"

    @property
    def without_effect(self) -> dict[str, str]:
        """Map each key that does nothing here to the reason."""
        takes_clip = self.surrogate in ("clip", "divergence")
        is_plain = self.surrogate == "clip" and self.ratio != "geometric"
        is_plain_nll = self.surrogate == "nll"
        reasons = {
            "clip": "" if takes_clip else f"{self.surrogate} has no clip",
            "dual": "" if is_plain else "it bounds the surrogate clip with ratio token or sequence",
            "bounds": "" if self.surrogate == "weighted" else "they are of the surrogate weighted",
            "negative_bounds": "" if self.surrogate == "weighted" else "they are of the surrogate weighted",
            "baseline": "the surrogate nll has no advantage" * is_plain_nll,
            "scale": "the surrogate nll has no advantage" * is_plain_nll,
            "anchor": "the surrogate nll has no ratio" * is_plain_nll,
            "ratio": f"the surrogate {self.surrogate} has no ratio" * (self.surrogate in ("dro", "nll"))
            or "geometric is of the surrogate clip"
            * (self.ratio == "geometric" and self.surrogate != "clip"),
        }
        return {key: reason for key, reason in reasons.items() if reason}


PRESETS: dict[_Name, _Parts] = {
    "grpo": _Parts(),
    "dr_grpo": _Parts(scale="one", level="constant"),
    "dapo": _Parts(clip=(0.2, 0.28)),
    "rloo": _Parts(baseline="loo", scale="one"),
    "reinforce": _Parts(baseline="zero", scale="one"),
    "reinforce++": _Parts(baseline="zero", scale="whiten"),
    "reinforce++_baseline": _Parts(scale="whiten"),
    "maxrl": _Parts(scale="mean"),
    "gspo": _Parts(ratio="sequence", clip=(3e-4, 4e-4), level="sequence"),
    "gmpo": _Parts(ratio="geometric", clip=(0.4, 0.4), level="sequence"),
    "cispo": _Parts(surrogate="weighted"),
    "sapo": _Parts(surrogate="soft", level="sequence"),
    "dppo": _Parts(scale="one", surrogate="divergence", anchor="sampler"),
    "topr": _Parts(scale="one", surrogate="weighted", negative_bounds=(0.0, 1.0)),
    "rft": _Parts(surrogate="nll"),
    "ppo": _Parts(baseline="critic", scale="whiten"),
    "distill": _Parts(scale="one", surrogate="weighted", anchor="sampler"),
    "custom": _Parts(),
}
_KL_IN_REWARD = ("rloo", "reinforce++", "distill", "ppo")
_OF_ADVANTAGES = ("baseline", "scale")
_OF_LOSSES = ("surrogate", "ratio", "anchor", "clip", "dual", "bounds", "negative_bounds")


class Kl(Part, frozen=True):
    """A penalty towards a reference.

    Attributes:
        coef: weight of the penalty; 0 turns it off. null is 1 for distill and 0 for others.
        type: estimator of Schulman, "Approximating KL divergence"; k3+ has the value of k3 and the gradient
            of k2. null is k3 in the loss, and k1 in the reward, where there is no other.
        where: in the loss of each token, or taken from the reward. null is what the algorithm says: reward
            for rloo, reinforce++, distill and ppo.
        target: KL in nats per token that `coef` is adapted to after each step (Ziegler et al., 2019, arXiv
            1909.08593); null leaves it as it is.
        horizon: samples over which it adapts.
        reset_every: steps after which the current version takes the place of the reference; 0 is never.
        reference: `start` is the adapter that the run starts from, `base` the model with the adapter off;
            `RUN@N` and a PEFT directory name another adapter. null is start for a run with lora.adapter_path
            and for a fork, as in TRL, and base for any other run. It is the teacher of distill; beside
            algorithm.teacher it names an adapter of that model, and null is none.
    """

    coef: NonNegativeFloat | None = None
    type: KlType | None = None
    where: Literal["loss", "reward"] | None = None
    target: PositiveFloat | None = None
    horizon: Positive = 10000
    reset_every: NonNegative = 0
    reference: Annotated[str, Meta(min_length=1)] | None = None


class Correction(Part, frozen=True):
    """Weights for the mismatch of trainer and engine, by rho = exp(trainer's - engine's log-probability).

    Attributes:
        kind: truncate bounds rho, mask leaves out what is outside of the bounds. token is rho of each token,
            sequence the product over its sample, geometric the geometric mean.
        low: the least rho.
        high: the greatest rho.
    """

    kind: CorrectionKind = "token_truncate"
    low: NonNegativeFloat = 0.0
    high: PositiveFloat = 2.0


class _DynamicSampling(Part, frozen=True):
    """More prompts are sampled in place of groups that teach nothing (DAPO, Yu et al., 2025).

    Attributes:
        max_batches: calls of the engine for one step; then the step goes on with the groups that there are.
        keep: least and greatest mean reward of a group that is kept; null keeps those whose rewards differ.
    """

    max_batches: Positive = 4
    keep: tuple[float, float] | None = None


class _Overlong(Part, frozen=True):
    """What long samples cost (DAPO).

    Attributes:
        buffer: tokens before rollout.max_new_tokens over which the cost rises; null is a fifth of those.
        penalty: taken from the reward of the longest sample.
    """

    buffer: Positive | None = None
    penalty: PositiveFloat = 1.0


class Preference(Part, frozen=True):
    """What dpo minimises; `lorad/rl/pairs.py` has the formulas.

    Attributes:
        loss: sigmoid is DPO. kto takes single completions with a label, all others pairs; simpo has no
            reference.
        beta: how strongly the policy is held to the reference: the more, the closer. null is 2 for simpo and
            0.1 for others.
        gamma: margin of simpo; null is 1.
        smoothing: share of pairs that are taken to be labelled the wrong way round; of sigmoid, sigmoid_norm
            and simpo.
        nll: weight of the negative log-likelihood of the chosen completions, which keeps them likely.
    """

    loss: PreferenceLoss = "sigmoid"
    beta: PositiveFloat | None = None
    gamma: NonNegativeFloat | None = None
    smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    nll: NonNegativeFloat = 0.0

    @property
    def strength(self) -> float:
        return self.beta or (2.0 if self.loss == "simpo" else 0.1)

    @property
    def margin(self) -> float:
        if self.loss != "simpo":
            return 0.0
        return 1.0 if self.gamma is None else self.gamma


class _Critic(Part, frozen=True):
    """An adapter with a value head on the same base, which predicts the rewards to come at each token.

    Attributes:
        lr: learning rate, constant. null is trainer.lr where that is given, else what fits the model by
            supervised fine-tuning.
        rank: rank of its adapter, at the scale of the policy's; null is lora.rank. Its rank on experts is in
            the same proportion, rounded down.
        warmup_steps: first steps in which the critic learns alone. The policy stays as it is and no version
            is published.
    """

    lr: PositiveFloat | None = None
    rank: Positive | None = None
    warmup_steps: NonNegative = 5


class Algorithm(Part, frozen=True):
    """What is trained on. A name stands for the parts below it, of which each may be given by itself.

    Attributes:
        name: the algorithm. sft trains on the completions in the data, dpo on preferences among them, tinker
            as its client asks (docs/tinker.md), all others on rewards of samples; custom is grpo with a loss
            or an advantage of your own. Keys that nothing reads with an algorithm are refused.
        preference: what dpo minimises.
        group_size: samples for each prompt; a sample's advantage is computed within its group.
        baseline: what a reward is compared with. group is the mean of its group, loo the mean of the others,
            length the mean by tokens, zero nothing, moving the mean of the steps before, critic the value of
            each token.
        scale: what the difference is divided by. std is the group's standard deviation, batch_std that of the
            step, mean the group's mean (MaxRL), whiten centres and scales over all tokens, one is nothing.
        surrogate: loss of a token. clip is PPO's, weighted CISPO's, soft SAPO's, divergence DPPO's and dro
            DRO's; nll is the negative log-likelihood of the samples that `best` and `least` keep.
        ratio: importance ratio of a token, of its sequence (GSPO), or geometric (GMPO).
        anchor: the policy that the ratio compares with. old is the trainer's before the step, sampler the
            engine's.
        clip: how far the importance ratio may fall below and rise above 1; for geometric its logarithm below
            and above 0, for divergence the probability.
        dual: bound of the loss of a token with negative advantage, in units of the advantage; null is none.
        bounds: least and greatest importance ratio of weighted.
        negative_bounds: bounds of weighted for advantages that are not positive; the ratio of the others is 1
            then.
        level: what is averaged. token is over all tokens of a batch, sequence over each sample first, prompt
            over the samples of each prompt first; constant divides by samples times rollout.max_new_tokens
            (Dr. GRPO), sum by nothing.
        best: samples of each group that nll keeps, by reward and then by their order; null is 1, or all that
            `least` leaves.
        least: reward that a sample needs to be kept by nll; null leaves out groups whose rewards are equal.
        kl: a penalty towards a reference.
        teacher: model with the same tokenizer that distill takes for its teacher, as model.path names one.
            null is the run's own model, on which kl.reference names the teacher.
        reward_coef: weight of the reward beside the teacher in distill; null is 0.
        entropy_coef: weight of a bonus for the entropy of the next token.
        truncated: what becomes of samples that rollout.max_new_tokens cuts off. keep trains on them, mask
            does not but counts their rewards in the baseline, penalise takes 1 from their reward.
        gamma: discount of later rewards with baseline critic, token by token.
        lam: lambda of its generalised advantage estimation (Schulman et al., 2016, arXiv 1506.02438). 1
            compares with what was sampled alone, 0 trusts the value of the next token.
        value_clip: how far a value may move in a step and still lower the critic's loss; null is no bound.
        critic: what baseline critic is made of.
        overlong: a cost of long samples; null is none but for dapo.
        dynamic_sampling: sample more prompts in place of groups that teach nothing; null does so for dapo.
        epochs: passes over the samples of a step.
        minibatches: optimizer steps in an epoch, each over a part of the prompts.
        drop_zero_variance: leave out groups whose samples all have the same reward; null does so where they
            have no gradient.
        skip_empty_updates: a step without any gradient changes neither Adam's moments nor the weights nor the
            version.
        importance_cap: cap of truncated importance sampling against the engine; null is 2 where engine and
            trainer are different programs and with rollout.max_staleness, and off otherwise.
        correction: another form of it, which costs a forward pass more.
        advantage: `path/to/file.py:function`, a function of yours in place of baseline and scale.
        loss: `path/to/file.py:function`, a function of yours in place of surrogate, ratio and clip; it costs
            a forward pass more for each update.
        user_code: the process in which these two run.
    """

    name: _Name = "grpo"
    preference: Preference = Preference()
    group_size: Positive = 8
    baseline: Baseline | None = None
    scale: Scale | None = None
    surrogate: Surrogate | None = None
    ratio: Ratio | None = None
    anchor: Anchor | None = None
    clip: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    dual: PositiveFloat | None = None
    bounds: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    negative_bounds: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    level: Level | None = None
    best: Positive | None = None
    least: float | None = None
    kl: Kl = Kl()
    teacher: Annotated[str, Meta(min_length=1)] | None = None
    reward_coef: NonNegativeFloat | None = None
    entropy_coef: NonNegativeFloat = 0.0
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    value_clip: PositiveFloat | None = 0.2
    critic: _Critic = _Critic()
    overlong: _Overlong | None = None
    dynamic_sampling: _DynamicSampling | None = None
    epochs: Positive = 1
    minibatches: Positive = 1
    drop_zero_variance: bool | None = None
    skip_empty_updates: bool = True
    importance_cap: PositiveFloat | None = None
    correction: Correction | None = None
    advantage: str | None = None
    loss: str | None = None
    user_code: UserCode = UserCode()

    @property
    def kind(self) -> Kind:
        """Return what steps learn from: rewards, completions, preferences, or what Tinker's client sends."""
        if self.name == "sft" or self.name == "tinker":
            return self.name
        return "preference" if self.name == "dpo" else "rl"

    @property
    def has_reference(self) -> bool:
        """Return whether log-probabilities of a reference are needed, as by a loss of the user's with one."""
        if self.kind == "preference":
            return self.preference.loss != "simpo"
        return self.kind == "rl" and bool(self.kl_coef or (self.loss and self.kl.reference))

    @property
    def parts(self) -> _Parts:
        """Return the parts that the name stands for, with those that are given. Only kind rl has any."""
        chosen = {key: getattr(self, key) for key in _Parts.__struct_fields__}
        chosen = {key: value for key, value in chosen.items() if value is not None}
        return replace(PRESETS.get(self.name, _Parts()), **chosen)

    @property
    def without_effect(self) -> dict[str, str]:
        """Map each part that does nothing here to the reason."""
        reasons = self.parts.without_effect
        if self.advantage:
            reasons |= dict.fromkeys(_OF_ADVANTAGES, "algorithm.advantage takes its place")
        if self.loss:
            reasons |= dict.fromkeys(_OF_LOSSES, "algorithm.loss takes its place")
            if not (self.kl_coef and self.kl_place == "loss") and not self.entropy_coef:
                reasons["level"] = "algorithm.loss takes its place"
        return reasons

    @property
    def in_words(self) -> str:
        """List the parts that have an effect, and what is set beside them."""
        if self.kind == "sft":
            return "negative log-likelihood of the completions"
        if self.kind == "tinker":
            return "the losses that Tinker's client asks for"
        if self.kind == "preference":
            preference = self.preference
            about = {"gamma": preference.margin, "smoothing": preference.smoothing, "nll": preference.nll}
            extras = [f"{key} {value:g}" for key, value in about.items() if value]
            return ", ".join([f"loss {preference.loss}", f"beta {preference.strength:g}", *extras])
        own = {"advantage": self.advantage, "loss": self.loss}
        words = [
            f"{key} {list(value) if isinstance(value, tuple) else value}"
            for key, value in {**own, **asdict(self.parts)}.items()
            if value is not None and key not in self.without_effect
        ]
        if (refill := self.refill) is not None:
            words.append(f"dynamic sampling in at most {refill.max_batches} batches")
        if (cost := self.cost_of_length) is not None:
            words.append(f"overlong penalty {cost.penalty:g}")
        if self.has_critic:
            words.append(f"gamma {self.gamma:g}, lambda {self.lam:g}")
        if self.teacher is not None:
            words.append(f"teacher {self.teacher}")
        if self.kl_coef:
            words.append(f"kl {self.kl_type} of {self.kl_coef:g} in the {self.kl_place}")
        if self.correction is not None:
            words.append(f"correction {self.correction.kind}")
        return ", ".join(words)

    @property
    def has_baseline(self) -> bool:
        """Return whether samples are compared within their group, as far as lorad knows."""
        is_lorads = self.parts.baseline in ("group", "loo", "length") and not self.advantage
        return (self.parts.surrogate == "nll" or is_lorads) and self.reads_reward

    @property
    def has_critic(self) -> bool:
        return self.parts.baseline == "critic"

    @property
    def drops(self) -> bool:
        """Return whether groups of equal rewards, which have no gradient, are left out.

        A KL term, an entropy bonus and a loss of the user's act on every sample.
        """
        is_centred = self.has_baseline and (self.parts.scale != "whiten" or self.parts.surrogate == "nll")
        is_asked_for = is_centred if self.drop_zero_variance is None else self.drop_zero_variance
        if self.parts.surrogate == "nll" and self.least is not None:
            return False
        return is_asked_for and not self.kl_coef and not self.entropy_coef and not self.loss

    @property
    def kl_coef(self) -> float:
        """Return the weight of the KL penalty where it is not adapted."""
        return self.kl.coef if self.kl.coef is not None else float(self.name == "distill")

    @property
    def reads_reward(self) -> bool:
        """Return whether the reward has a part in the gradient."""
        return self.name != "distill" or bool(self.reward_coef)

    @property
    def kl_place(self) -> Literal["loss", "reward"]:
        """Return where the KL penalty acts."""
        return self.kl.where or ("reward" if self.name in _KL_IN_REWARD else "loss")

    @property
    def kl_type(self) -> KlType:
        return self.kl.type or ("k1" if self.kl_place == "reward" else "k3")

    @property
    def refill(self) -> _DynamicSampling | None:
        return self.dynamic_sampling or (_DynamicSampling() if self.name == "dapo" else None)

    @property
    def cost_of_length(self) -> _Overlong | None:
        return self.overlong or (_Overlong() if self.name == "dapo" else None)
