"""List all rules in the order of their questions: what explains another finding stands before it."""

from collections.abc import Callable

from lorad.client.client import Client
from lorad.text import counted
from lorad.why import evidence, learning, rewards
from lorad.why.facts import Facts, gather
from lorad.why.finding import Finding, Why

RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    evidence.ended_badly,  # Has it made a step?
    rewards.graders_fail,  # Do graders fail?
    learning.not_finite,  # Are loss and gradient finite?
    learning.unserved,  # Does the engine serve what is trained?
    evidence.few_trained,  # Is anything of the rows trained?
    rewards.empty,  # Do completions have a text?
    rewards.no_end,  # Does the end of a turn end a completion?
    rewards.blind_reward,  # Does the reward see what it looks for?
    rewards.unused_template,  # Is the base asked in its own form?
    rewards.cut_off,  # Are completions cut?
    rewards.inverted,  # Does it reward what is right?
    rewards.answers_elsewhere,  # Do answers belong to their prompts?
    rewards.constant,  # Does the reward differ?
    rewards.floor,  # Does the base ever earn anything?
    rewards.alike,  # Do the samples of a prompt differ?
    rewards.solved,  # Is there anything to learn?
    rewards.small_groups,  # Are groups large enough?
    rewards.flat_groups,  # Do the rewards of a group differ?
    learning.still,  # Does the adapter move?
    learning.unproved,  # Do attestations prove what is served?
    learning.apart,  # Do trainer and engine agree?
    learning.rate,  # Is the learning rate beside published ones?
    learning.kl_holds,  # Does a KL penalty hold it?
    learning.length_hacking,  # Does it learn to be long?
    learning.repetition,  # Does it repeat itself?
    learning.entropy_gone,  # Does it still try anything?
    learning.kl_away,  # Did it run away from its reference?
    evidence.overfit,  # Does it learn its rows by heart?
    evidence.leaking,  # Are held-out rows held out?
    evidence.duplicates,  # Do the rows differ?
    evidence.few_evals,  # Is there enough held out to tell?
    learning.gets_worse,  # Does it get worse?
)


def explain(client: Client, run: str) -> Why:
    """Answer why a run does not learn. Raises NotFound, and LoradError for a spec of another lorad."""
    return judge(gather(client, run))


def judge(facts: Facts) -> Why:
    """Answer by the figures alone."""
    findings = [finding for rule in RULES if (finding := rule(facts)) is not None]
    name = "reward" if facts.curve("reward") else "loss"
    first = facts.start(name)
    last = facts.end(name)
    steps = counted(facts.run.step, "step")
    how = "that is within its noise"
    if facts.learns:
        how = "it learns"
    elif len(facts.steps) < 6:
        how = "that is too early to tell"
    says = f"It has made {steps}."
    if first is not None and last is not None:
        says = f"Its {name} went from {first:.3g} to {last:.3g} in {steps}: {how}."
    counts = {
        "steps": len(facts.steps),
        "samples": len(facts.samples),
        "evaluations": len(facts.evals),
        "versions": len(facts.versions),
        "questions": len(RULES),
    }
    looked = f"Looked at {', '.join(f'{count} {noun}' for noun, count in counts.items())}."
    return Why(facts.run.name, findings, says, looked)
