"""Judge samples and their rewards: is there anything to learn from?"""

import math
import re
from statistics import fmean, pstdev

from lorad.text import SPECIAL
from lorad.why.facts import Facts, answer_of, gives_answer
from lorad.why.finding import Finding

_MANY = 0.5  # share of samples or groups that are most of them
_FAILING = 0.1  # share of rewards
_SOLVED = 0.9  # of the highest reward
_RARE = 0.02  # share of groups with any reward
_FEW = 4  # samples that are an accident


def graders_fail(facts: Facts) -> Finding | None:
    """Find rewards that fail: their samples teach nothing."""
    counts = facts.curve("failed_rewards")
    group = facts.spec.data.prompts_per_step * facts.spec.algorithm.group_size
    share = sum(counts) / (len(counts) * group) if counts else 0.0
    if share < _FAILING:
        return None
    errors = [sample.error for sample in facts.samples if sample.error]
    common = max(set(errors), key=errors.count) if errors else "their samples are not kept"
    return Finding(
        "graders-fail",
        "cause",
        f"The reward fails on {share:.0%} of the samples, which then teach nothing: {common}.",
        {"failed": share, "error": common},
        f"lorad samples {facts.run.name} --failed",
    )


def blind_reward(facts: Facts) -> Finding | None:
    """Find a reward that looks for what it is never given: special tokens, stop strings, another format."""
    span = facts.reward_span
    if span is None or span[0] != span[1]:
        return None
    for reward in facts.spec.rewards:
        if reward.name != "regex" or reward.raw or reward.pattern is None:
            continue
        plain = re.sub(r"\\(.)", r"\1", reward.pattern)
        never = [text for text in facts.spec.rollout.stop if text in plain]
        never += [match[0] for match in SPECIAL.finditer(plain)]
        if never:
            return Finding(
                "blind-reward",
                "cause",
                f"Every reward is {span[0]:g}: the pattern {reward.pattern!r} asks for {never[0]!r}, and the "
                "text of a completion is given without special tokens and without what stopped it.",
                {"reward": span[0], "text": never[0]},
                "reward.raw=true",
            )
    right = [sample for sample in facts.answered if sample.finish == "stop" and gives_answer(sample)]
    if span[0] > 0 or len(right) < max(_FEW, 0.05 * len(facts.answered)):
        return None
    names = ", ".join(reward.name for reward in facts.spec.rewards)
    return Finding(
        "blind-reward",
        "cause",
        f"{len(right)} of {len(facts.answered)} samples have the answer of their row in them, and {names} "
        f"gives all of them {span[0]:g}: it looks for another format.",
        {"reward": span[0], "right": len(right), "samples": len(facts.answered)},
        f"lorad samples {facts.run.name} --sample 1",
    )


def no_end(facts: Facts) -> Finding | None:
    """Find completions that write a special token and go on: none of these ends them."""
    cut = facts.from_start("truncated")
    inside = facts.from_start("special_inside")
    if cut < _MANY or inside < _MANY:
        return None
    return Finding(
        "no-end",
        "cause",
        f"{cut:.0%} of the first completions are cut at rollout.max_new_tokens, and {inside:.0%} have a "
        "special token before their end: the token that ends a turn is not among those that end a "
        "completion.",
        {"truncated": cut, "special_inside": inside},
        "set eos_token_id in the model's generation_config.json to the end of a turn",
    )


def cut_off(facts: Facts) -> Finding | None:
    """Find completions that are cut before they can earn anything."""
    cut = facts.from_start("truncated")
    limit = facts.spec.rollout.max_new_tokens
    if cut < _MANY or facts.learns:
        return None
    whole = [s.reward for s in facts.early if s.reward is not None and s.finish == "stop"]
    short = [s.reward for s in facts.early if s.reward is not None and s.finish == "length"]
    span = facts.reward_span
    if short and span is not None and fmean(short) > span[0] and fmean(short) >= fmean(whole or [0.0]):
        return None  # being cut costs nothing
    earned = ""
    if whole and short:
        earned = f", and earn {fmean(short):.3g} where whole ones earn {fmean(whole):.3g}"
    return Finding(
        "cut-off",
        "cause",
        f"{cut:.0%} of the first completions are cut at rollout.max_new_tokens, {limit}{earned}.",
        {"truncated": cut, "max_new_tokens": limit},
        f"rollout.max_new_tokens={4 * limit}",
    )


def empty(facts: Facts) -> Finding | None:
    """Find completions without any text."""
    share = facts.from_start("empty")
    if share < _MANY:
        return None
    stops = facts.spec.rollout.stop
    why = f" rollout.stop ends them at once: {stops}." if stops else ""
    return Finding(
        "empty",
        "cause",
        f"{share:.0%} of the first completions have no text.{why}",
        {"empty": share},
        "rollout.stop=[]" if stops else f"lorad samples {facts.run.name} --step 1",
    )


def inverted(facts: Facts) -> Finding | None:
    """Find a reward that is lower where the answer of the row stands in the completion, in the same group."""
    groups: dict[tuple[int, str], tuple[list[float], list[float]]] = {}
    for sample in facts.early:
        if sample.reward is not None and answer_of(sample):
            pair = groups.setdefault((sample.step, sample.prompt_id), ([], []))
            pair[gives_answer(sample)].append(float(sample.reward))
    mixed = [(fmean(wrong), fmean(right)) for wrong, right in groups.values() if wrong and right]
    losses = [wrong - right for wrong, right in mixed]
    if len(mixed) < _FEW or fmean(losses) <= 2 * pstdev(losses) / len(losses) ** 0.5:
        return None
    span = facts.reward_span
    if span is None or fmean(losses) < 0.2 * (span[1] - span[0]):
        return None
    wrong, right = (fmean(column) for column in zip(*mixed, strict=True))
    return Finding(
        "inverted",
        "cause",
        f"In {len(mixed)} groups samples with the answer of their row earn {right:.3g}, and those without it "
        f"{wrong:.3g}: the reward teaches to be wrong.",
        {"right": right, "wrong": wrong, "groups": len(mixed)},
        f"lorad samples {facts.run.name} --sort reward",
    )


def answers_elsewhere(facts: Facts) -> Finding | None:
    """Find completions that are the answers of other rows more often than of their own."""
    answers: dict[str, set[str]] = {}
    for sample in facts.answered:
        answers.setdefault(answer_of(sample), set()).add(sample.prompt)
    own = sum(answer_of(sample) == sample.completion.strip() for sample in facts.answered)
    others = [s for s in facts.answered if answers.get(s.completion.strip(), set()) - {s.prompt}]
    elsewhere = sum(answer_of(sample) != sample.completion.strip() for sample in others)
    if elsewhere < max(_FEW, 2 * own):
        return None
    return Finding(
        "answers-elsewhere",
        "cause",
        f"{elsewhere} of {len(facts.answered)} completions are the answer of another row, {own} of their "
        "own: the column of answers does not fit that of prompts.",
        {"elsewhere": elsewhere, "own": own, "samples": len(facts.answered)},
        f"lorad samples {facts.run.name} --step 1",
    )


def unused_template(facts: Facts) -> Finding | None:
    """Find prompts that are not written by the chat template of a base that earns nothing on them."""
    begun = facts.run.begun
    passed = _passed(facts)
    if begun is None or begun.rows.template != "unused" or not begun.rows.rows or passed is None:
        return None
    if passed > _RARE or facts.learns:
        return None
    return Finding(
        "template",
        "cause",
        f"The base earns something in {passed:.1%} of its first groups, and its chat template does not write "
        "the prompts (data.chat_template is never): it is asked in a form that it was not trained on.",
        {"pass": passed, "template": begun.rows.template},
        "data.chat_template=auto",
    )


def constant(facts: Facts) -> Finding | None:
    """Find a reward that is the same for every sample, and not its floor."""
    span = facts.reward_span
    if span is None or span[0] != span[1] or span[0] <= 0:
        return None
    return Finding(
        "constant-reward",
        "cause",
        f"Every sample of the run earns {span[0]:g}: a reward that does not differ teaches nothing.",
        {"reward": span[0]},
        f"lorad samples {facts.run.name} --step 1",
    )


def floor(facts: Facts) -> Finding | None:
    """Find a base that never earns more than the floor, so that nothing can be reinforced."""
    passed = _passed(facts)
    span = facts.reward_span
    size = facts.spec.algorithm.group_size
    if passed is None or span is None or passed > _RARE or facts.learns or span[0] == span[1] > 0:
        return None
    return Finding(
        "floor",
        "cause",
        f"The base earns more than {span[0]:g} in {passed:.1%} of its first groups (pass@{size}): what it "
        "never does cannot be reinforced. Start with easier rows, a reward in parts, or SFT.",
        {"pass": passed, "k": size, "floor": span[0]},
        f"lorad samples {facts.run.name} --step 1",
    )


def _passed(facts: Facts) -> float | None:
    """Return the share of the first groups in which a sample beats the floor; None without rewards."""
    best: dict[tuple[int, str], float] = {}
    for sample in facts.early:
        if sample.reward is not None:
            key = sample.step, sample.prompt_id
            best[key] = max(best.get(key, -math.inf), float(sample.reward))
    if not best or facts.reward_span is None:
        return None
    return fmean(value > facts.reward_span[0] for value in best.values())


def alike(facts: Facts) -> Finding | None:
    """Find samples of a prompt that are nearly all the same, before training has made them so."""
    kinds = facts.curve("distinct")[:1]
    flat = facts.flat_from_start
    size = facts.spec.algorithm.group_size
    if not kinds or size < 3 or flat < _MANY or kinds[0] > 1 / size + 0.15:
        return None
    temperature = facts.spec.rollout.temperature
    return Finding(
        "alike",
        "cause",
        f"Of the {size} samples of a prompt only {kinds[0] * size:.1f} differ at the start, so that "
        f"{flat:.0%} of the groups have one reward; rollout.temperature is {temperature:g}.",
        {"distinct": kinds[0], "zero_variance": flat, "temperature": temperature},
        "rollout.temperature=1" if temperature < 1 else f"lorad samples {facts.run.name} --step 1",
    )


def solved(facts: Facts) -> Finding | None:
    """Find rows that the base gets right already."""
    reward = facts.from_start("reward")
    span = facts.reward_span
    if span is None or span[0] == span[1]:
        return None
    place = (reward - span[0]) / (span[1] - span[0])
    if place < _SOLVED:
        return None
    return Finding(
        "solved",
        "look",
        f"The base earns {reward:.3g} of at most {span[1]:g} at the start: there is little to learn.",
        {"reward": reward, "highest": span[1]},
        "train on harder rows: data.train",
    )


def small_groups(facts: Facts) -> Finding | None:
    """Find groups too small to have rewards that differ."""
    flat = min((facts.mean("zero_variance_groups") or 0.0) / facts.spec.data.prompts_per_step, 1.0)
    size = facts.spec.algorithm.group_size
    if size > 3 or flat < _MANY or facts.learns:
        return None
    return Finding(
        "small-groups",
        "cause",
        f"algorithm.group_size is {size}, and {flat:.0%} of the groups have one reward: only the others "
        "teach anything.",
        {"group_size": size, "zero_variance": flat},
        "algorithm.group_size=8",
    )


def flat_groups(facts: Facts) -> Finding | None:
    """Find groups that have one reward each from the start."""
    flat = facts.flat_from_start
    span = facts.reward_span
    if flat < 0.8 or facts.learns or span is None or span[0] == span[1]:
        return None
    return Finding(
        "flat-groups",
        "cause",
        f"{flat:.0%} of the first groups have one reward: a sample is compared with its group, and they "
        "teach nothing.",
        {"zero_variance": flat},
        "algorithm.dynamic_sampling={max_batches: 4}",
    )
