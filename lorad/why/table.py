"""List all rules in the order of their questions: what explains another finding stands before it."""

from collections.abc import Callable
from typing import NamedTuple

from lorad.client.client import Client
from lorad.why import evidence, learning, rewards
from lorad.why.facts import Facts, gather
from lorad.why.finding import Finding, Why


class _Rule(NamedTuple):
    """A question, and the function that finds what is wrong; None where nothing is."""

    question: str
    judge: Callable[[Facts], Finding | None]


RULES = (
    _Rule("Has it made a step?", evidence.ended_badly),
    _Rule("Do graders fail?", rewards.graders_fail),
    _Rule("Are loss and gradient finite?", learning.not_finite),
    _Rule("Does the engine serve what is trained?", learning.unserved),
    _Rule("Is anything of the rows trained?", evidence.few_trained),
    _Rule("Do completions have a text?", rewards.empty),
    _Rule("Does the end of a turn end a completion?", rewards.no_end),
    _Rule("Does the reward see what it looks for?", rewards.blind_reward),
    _Rule("Is the base asked in its own form?", rewards.unused_template),
    _Rule("Are completions cut?", rewards.cut_off),
    _Rule("Does it reward what is right?", rewards.inverted),
    _Rule("Do answers belong to their prompts?", rewards.answers_elsewhere),
    _Rule("Does the reward differ?", rewards.constant),
    _Rule("Does the base ever earn anything?", rewards.floor),
    _Rule("Do the samples of a prompt differ?", rewards.alike),
    _Rule("Is there anything to learn?", rewards.solved),
    _Rule("Are groups large enough?", rewards.small_groups),
    _Rule("Do the rewards of a group differ?", rewards.flat_groups),
    _Rule("Does the adapter move?", learning.still),
    _Rule("Do attestations prove what is served?", learning.unproved),
    _Rule("Do trainer and engine agree?", learning.apart),
    _Rule("Is the learning rate beside published ones?", learning.rate),
    _Rule("Does a KL penalty hold it?", learning.kl_holds),
    _Rule("Does it learn to be long?", learning.length_hacking),
    _Rule("Does it repeat itself?", learning.repetition),
    _Rule("Does it still try anything?", learning.entropy_gone),
    _Rule("Did it run away from its reference?", learning.kl_away),
    _Rule("Does it learn its rows by heart?", evidence.overfit),
    _Rule("Are held-out rows held out?", evidence.leaking),
    _Rule("Do the rows differ?", evidence.duplicates),
    _Rule("Is there enough held out to tell?", evidence.few_evals),
    _Rule("Does it get worse?", learning.rises_not),
)


def explain(client: Client, run: str) -> Why:
    """Answer why a run does not learn. Raises NotFound, and LoradError for a spec of another lorad."""
    return judge(gather(client, run))


def judge(facts: Facts) -> Why:
    """Answer by the figures alone."""
    findings = [finding for rule in RULES if (finding := rule.judge(facts)) is not None]
    name = "reward" if facts.curve("reward") else "loss"
    first = facts.start(name)
    last = facts.end(name)
    steps = f"{facts.run.step} step{'s' * (facts.run.step != 1)}"
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
