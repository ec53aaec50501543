"""Judge what training does to the adapter: does it move, is it served, where does it run away to?"""

from collections.abc import Iterable
from statistics import StatisticsError, correlation, fmean

from msgspec.structs import replace

from lorad.records.samples import Sample
from lorad.rl.rate import rate_doubts
from lorad.why.facts import Facts, answer_of, gives_answer
from lorad.why.finding import Finding

_MANY = 0.5  # share of updates or versions
_STILL = 1e-5  # nats per token: what rounding moves, and less than one update of a usual rate
_SLOW = 1e-3  # nats per token that a run of many updates has moved
_UPDATES = 10
_APART = 0.05  # nats per token between trainer and engine, as `alarms.logprob_difference`
_FAR = 0.5  # nats per token from the reference, as `alarms.kl`
_STRONG = 0.2  # a coefficient of KL, five times the largest of published runs (TRL and DeepSeek: 0.04)
_CERTAIN = 0.02  # nats of entropy per token
_LONGER = 1.5  # times the first length
_EARNED = 0.4  # correlation of reward and length in a group
_LOW_RANK = 8
_REPEATED = 0.4  # share of runs of four tokens


def not_finite(facts: Facts) -> Finding | None:
    """Find updates that were skipped because loss or gradient was not finite."""
    skipped = sum(facts.curve("skipped_updates"))
    updates = sum(facts.curve("updates"))
    if not skipped or skipped < 0.2 * (skipped + updates):
        return None
    return Finding(
        "not-finite",
        "cause",
        f"{skipped:.0f} of {skipped + updates:.0f} updates were skipped: loss or gradient was not finite.",
        {"skipped": skipped, "updates": updates},
        f"trainer.lr={(facts.spec.trainer.lr or 0.0) / 10:g}",
    )


def still(facts: Facts) -> Finding | None:
    """Find an adapter that its updates do not move."""
    trainer = facts.spec.trainer
    lora = facts.spec.lora
    updates = sum(facts.curve("updates"))
    moved = facts.curve("policy_change")
    if not updates or not moved:
        return None
    norms = facts.curve("adapter_norm")
    gradients = facts.curve("grad_norm")
    figures: dict[str, float | int | str] = {"policy_change": moved[-1], "updates": updates}
    figures |= {"adapter_norm": norms[-1]} if norms else {}
    steps = facts.curve("policy_step")
    if max(moved[-1], *steps) > _STILL and (moved[-1] > _SLOW or updates < _UPDATES or facts.learns):
        return None
    is_still = max(moved[-1], *steps) <= _STILL
    says = (
        f"{updates:.0f} updates have moved the policy by {moved[-1]:.2g} nats per token from where it began"
    )
    if trainer.lr == 0:
        reason = "trainer.lr is 0"
        step = "trainer.lr=null"
    elif gradients and max(gradients) == 0 and lora.init == "zero":
        reason = "lora.init is zero, so that A and B have no gradient"
        step = "lora.init=kaiming"
    elif gradients and max(gradients) == 0:
        reason = "every gradient is 0"
        step = f"lorad samples {facts.run.name}"
    elif trainer.loraplus_lr_ratio < 0.1:
        reason = f"B has {trainer.loraplus_lr_ratio:g} times the rate of A, and begins at 0"
        step = "trainer.loraplus_lr_ratio=1"
    else:
        reason = f"trainer.lr is {trainer.lr:g}"
        step = "trainer.lr=null"
    reason += f"; the norm of B A is {norms[-1]:.2g}" if norms else ""
    return Finding("still", "cause" if is_still else "look", f"{says}: {reason}.", figures, step)


def unserved(facts: Facts) -> Finding | None:
    """Find a run that ended because the engine was seen to serve something else."""
    if facts.run.reason != "attestation_failed":
        return None
    return Finding(
        "unserved",
        "cause",
        f"The engine does not serve what was trained: {facts.run.detail.removesuffix('.')}.",
        {"versions": len(facts.versions)},
        f"lorad verify {facts.run.name}",
    )


def unproved(facts: Facts) -> Finding | None:
    """Find versions of which most attestations prove nothing."""
    doubtful = [version for version in facts.versions if version.attested == "inconclusive"]
    if not doubtful or len(doubtful) < _MANY * len(facts.versions):
        return None
    return Finding(
        "unproved",
        "look",
        f"The attestation of {len(doubtful)} of {len(facts.versions)} versions is inconclusive: "
        f"{doubtful[-1].attestation.removesuffix('.')}.",
        {"inconclusive": len(doubtful), "versions": len(facts.versions)},
        f"lorad verify {facts.run.name}",
    )


def apart(facts: Facts) -> Finding | None:
    """Find an engine whose log-probabilities are not the trainer's."""
    difference = facts.mean("logprob_difference")
    if difference is None or difference < _APART:
        return None
    return Finding(
        "mismatch",
        "cause",
        f"Trainer and engine differ by {difference:.2g} nats per token under the same weights: the samples "
        "are off-policy.",
        {"logprob_difference": difference},
        "algorithm.correction={kind: token_truncate, high: 2.0}",
    )


def rate(facts: Facts) -> Finding | None:
    """Find a learning rate, or a rank, that is far from those with which such runs have learnt."""
    fits = facts.run.rate
    spec = facts.spec
    if fits is None or not (doubts := rate_doubts(spec, fits)) or facts.learns:
        return None
    lr = spec.trainer.lr or fits.lr
    low_rank = replace(spec, lora=replace(spec.lora, rank=min(_LOW_RANK, spec.lora.rank)))
    return Finding(
        "rate",
        "cause" if lr > fits.lr else "look",
        f"{'; '.join(doubts)}. {_moved(facts)}".strip(),
        {"lr": lr, "fits": fits.lr, "rank": spec.lora.rank},
        "trainer.lr=null" if rate_doubts(low_rank, fits) else f"lora.rank={_LOW_RANK}",
    )


def _moved(facts: Facts) -> str:
    """Say how far the policy has moved; "" where that is not known."""
    moved = facts.curve("policy_change")
    return f"The policy is {max(moved):.2g} nats per token from the base." if moved else ""


def length_hacking(facts: Facts) -> Finding | None:
    """Find completions that get longer because length itself is rewarded, within groups."""
    first = facts.start("response_length")
    last = facts.end("response_length")
    if not first or last is None or last < _LONGER * first or facts.trend("response_length") < 2:
        return None
    groups: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for sample in facts.samples:
        if sample.reward is not None:
            group = groups.setdefault((sample.step, sample.prompt_id), [])
            group.append((float(sample.reward), float(sample.size)))
    rewards: list[float] = []
    sizes: list[float] = []
    for group in groups.values():
        reward, size = (fmean(column) for column in zip(*group, strict=True))
        rewards += [value - reward for value, _ in group]
        sizes += [length - size for _, length in group]
    try:
        earned = correlation(rewards, sizes)
    except StatisticsError:  # fewer than two, or one of both never differs
        earned = 0.0
    if earned < _EARNED or _right(facts.late) > _right(facts.early):
        return None
    return Finding(
        "length-hacking",
        "cause",
        f"Completions grew from {first:.0f} to {last:.0f} tokens, and within a group reward goes with length "
        f"(correlation {earned:.2f}) while no more answers are right.",
        {"first": first, "last": last, "correlation": earned},
        "algorithm.overlong={penalty: 1.0}",
    )


def _right(samples: Iterable[Sample]) -> float:
    """Return the share of completions that are the answer of their row; 0 where rows have none."""
    answered = [sample for sample in samples if answer_of(sample)]
    return fmean(gives_answer(sample) for sample in answered) if answered else 0.0


def repetition(facts: Facts) -> Finding | None:
    """Find completions that have come to repeat themselves."""
    first = facts.start("repetition")
    last = facts.end("repetition")
    if first is None or last is None or last < max(_REPEATED, 2 * first):
        return None
    return Finding(
        "repetition",
        "cause",
        f"{last:.0%} of four tokens in a row stood in the same completion before, {first:.0%} at the start: "
        "it repeats itself, and the reward does not mind.",
        {"first": first, "last": last},
        f"lorad samples {facts.run.name} --sort reward",
    )


def entropy_gone(facts: Facts) -> Finding | None:
    """Find a policy that tries nothing any more."""
    first = facts.start("entropy")
    last = facts.end("entropy")
    if first is None or last is None or last > min(_CERTAIN, first / 5) or facts.learns:
        return None
    if not facts.mean("zero_variance_groups"):
        return None
    return Finding(
        "entropy",
        "look",
        f"The entropy fell from {first:.2g} to {last:.2g} nats per token, and the reward does not rise: "
        "hardly anything is tried any more.",
        {"first": first, "last": last},
        "algorithm.entropy_coef=0.01",
    )


def kl_away(facts: Facts) -> Finding | None:
    """Find a policy that ran away from its reference while it earned less."""
    kl = facts.end("kl")
    fell = facts.trend("reward")
    far = kl if kl is not None else (facts.end("policy_change") or 0.0)
    if far < _FAR or fell > -2:
        return None
    return Finding(
        "kl",
        "cause",
        f"The policy is {far:.2g} nats per token from its reference, and the reward fell from "
        f"{facts.start('reward'):.3g} to {facts.end('reward'):.3g}.",
        {"kl": far, "reward_trend": fell},
        f"trainer.lr={(facts.spec.trainer.lr or 0.0) / 10:g}",
    )


def kl_holds(facts: Facts) -> Finding | None:
    """Find a KL penalty that holds the policy where it is."""
    coef = facts.end("kl_coef") or facts.spec.algorithm.kl_coef
    if facts.spec.algorithm.name == "distill" or coef < _STRONG or facts.learns:
        return None
    kl = facts.end("kl") or 0.0
    return Finding(
        "kl-too-strong",
        "cause",
        f"algorithm.kl.coef is {coef:g}, where published runs have 0.001 to 0.04, and the reward does not "
        f"rise: the penalty holds the policy at {kl:.2g} nats per token from its reference.",
        {"kl_coef": coef, "kl": kl},
        "algorithm.kl.coef=0.001",
    )


def gets_worse(facts: Facts) -> Finding | None:
    """Find a reward, or a loss, that goes the wrong way without another reason."""
    if facts.trend("reward") < -3:
        name = "reward"
        first = facts.start("reward")
        last = facts.end("reward")
    elif not facts.curve("reward") and facts.trend("loss") > 3:
        name = "loss"
        first = facts.start("loss")
        last = facts.end("loss")
    else:
        return None
    return Finding(
        "worse",
        "look",
        f"The {name} went from {first:.3g} to {last:.3g}. {_moved(facts)}".strip(),
        {"first": first or 0.0, "last": last or 0.0},
        f"trainer.lr={(facts.spec.trainer.lr or 0.0) / 10:g}",
    )
