"""A GRPO run of the random model in the fused pool, as a user would start it; its pool is killed, and it
resumes.
"""

import time
from statistics import median

from benchmarks.gpu_day.stage import Place, play
from lorad.protocol.journal import read
from lorad.records.measured import Step
from lorad.records.runs import RunDetails
from tests.kit.world import World, world

_NAME = "day"
_PATIENCE = 100.0  # seconds until a step: less than the stage has, so that its log says what was missing

# of a step, as its journal has them; medians are told
_METRICS = {
    "step_s": "seconds",
    "sample_s": "seconds_sample",
    "train_s": "seconds_train",
    "publish_s": "seconds_publish",
    "attest_s": "seconds_attest",
    "rollout_tokens_per_s": "tokens_per_second",
    "trainer_tokens_per_s": "trainer_tokens_per_second",
    "trainer_against_engine_nats": "logprob_difference",
}

# A random base gets no problem right: what it writes is rewarded by its letters, so that groups differ.
_REWARD = "def score(completion: str) -> float:\n    return sum(map(ord, completion)) % 10 / 10\n"
_SPEC = """
model: {{path: {model}}}
lora: {{rank: {rank}, alpha: {alpha}}}
algorithm: {{name: grpo, group_size: 8, drop_zero_variance: false}}
data: {{train: sort, prompts_per_step: {prompts}, max_prompt_tokens: 128}}
reward: {reward}:score
trainer: {{lr: 1.0e-4, steps: {steps}, activation_checkpointing: true}}
rollout: {{max_new_tokens: {tokens}, temperature: 1.0}}
eval: {{every: 0}}
checkpoint: {{every: 2}}
"""


def run(place: Place) -> None:
    with world() as made:
        began = time.monotonic()
        made.lorad("run", _spec(place, made), "--name", _NAME, "--detach")
        _wait_for(made, 1)
        place.say("until_first_step_s", time.monotonic() - began)
        made.strike(_NAME, "pool", place.size.steps // 2, _PATIENCE / 2)
        made.lorad("wait", _NAME, expect=1)
        killed = made.client.show(_NAME)
        place.say("killed_at_step", killed.step)
        began = time.monotonic()
        made.lorad("resume", _NAME, "--detach")
        _wait_for(made, killed.step + 1)
        place.say("resume_to_next_step_s", time.monotonic() - began)
        made.completed(_NAME, _PATIENCE)
        (pool,) = made.client.pools()
        if pool.mode != "fused":
            raise SystemExit(f"its pool is {pool.mode}")
        _say_steps(place, made.client.steps(_NAME))
        _say_versions(place, made)


def _wait_for(made: World, step: int) -> None:
    """Wait until the run has made a step, by its journal: the daemon may know of it much later. A run that
    ended before says why at once.
    """
    journal = made.home.run(_NAME).journal

    def look() -> RunDetails | bool:
        if any(record.kind == "step" and record.step >= step for record, _ in read(journal)):
            return True
        shown = made.client.show(_NAME)
        return shown if shown.state == "ended" and shown.step < step else False

    if isinstance(ended := made.until(look, f"{_NAME} at step {step}", _PATIENCE), RunDetails):
        raise SystemExit(f"the run ended: {ended.reason} at step {ended.step}: {ended.detail}")


def _spec(place: Place, made: World) -> str:
    reward = made.root / "reward.py"
    reward.write_text(_REWARD)
    text = _SPEC.format(
        model=place.dense,
        rank=place.size.rank,
        alpha=2 * place.size.rank,
        prompts=place.size.prompts,
        reward=reward,
        steps=place.size.steps,
        tokens=place.size.run_tokens,
    )
    return str(made.spec(text))


def _say_steps(place: Place, steps: list[Step]) -> None:
    """Say what the steps took; each of them must be there once."""
    numbers = [step.step for step in steps]
    if numbers != list(range(1, place.size.steps + 1)):
        raise SystemExit(f"the run has the steps {numbers}, and not each of {place.size.steps} once")
    place.say("steps", len(steps))
    for name, metric in _METRICS.items():
        place.say(name, median(found for step in steps if (found := step.metrics.get(metric)) is not None))


def _say_versions(place: Place, made: World) -> None:
    versions = made.client.adapters(_NAME)
    verdicts = [version.attested for version in versions]
    place.say("versions_passed", verdicts.count("passed"))
    place.say("versions_inconclusive", verdicts.count("inconclusive"))
    place.say("versions_failed", verdicts.count("failed"))
    if "failed" in verdicts or set(verdicts) - {"passed", "inconclusive"}:
        raise SystemExit(f"versions were attested as {verdicts}: {versions[-1].attestation}")


if __name__ == "__main__":
    play(run)
