"""Choose what a spec leaves open: learning rate, adapter, loggers and receivers of notifications."""

from msgspec.structs import replace

from lorad.protocol.preflight import SpecFacts
from lorad.rl.doubts import refuse_contradictions
from lorad.rl.rate import fitting_rate, rate_doubts
from lorad.spec.model import Spec


def rated(spec: Spec, facts: SpecFacts) -> tuple[Spec, SpecFacts]:
    """Fill in keys of lora, loggers, notify and trainer.lr where they are not given, from what the preflight
    found, and warn where the rate is far off or the rank high.

    Raises SpecError when trainer.min_lr is more than the rate that was chosen.
    """
    if spec.algorithm.kind != "tinker":  # whose rate comes with each step
        rate = fitting_rate(spec, facts.model_type, facts.hidden_size)
        facts = replace(facts, rate=rate, warnings=[*facts.warnings, *rate_doubts(spec, rate)])
        if spec.trainer.lr is None:
            critic = replace(spec.algorithm.critic, lr=spec.algorithm.critic.lr or rate.critic)
            algorithm = replace(spec.algorithm, critic=critic)
            spec = replace(spec, trainer=replace(spec.trainer, lr=rate.lr), algorithm=algorithm)
            refuse_contradictions(spec)
    if facts.lora is not None:  # a fork was checked with the directory that its weights lay in
        spec = replace(spec, lora=replace(facts.lora, adapter_path=spec.lora.adapter_path))
    if spec.loggers is None:
        spec = replace(spec, loggers=facts.loggers)
    if spec.notify is None:
        spec = replace(spec, notify=facts.notify)
    return spec, facts
