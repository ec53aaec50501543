"""What runs measured: a step, an evaluation, and the result of a version that somebody evaluated."""

from typing import Any

from msgspec import Struct

from lorad.protocol.evals import SetScore, figures

Number = int | float  # keeps its JSON type: a count stays an integer

Metrics = dict[str, Number | None]  # None: it was no finite number


class Step(Struct, frozen=True):
    """A step of the surviving lineage.

    Metrics of every step: lr, updates, response_length, truncated, zero_variance_groups, failed_rewards,
    failed_rewards_total, skipped_updates, skipped_updates_total, idle_steps_total, tokens, trained_tokens,
    tokens_per_second, seconds, seconds_sample, seconds_score, seconds_weigh, seconds_train. Where they were
    measured: reward, reward_std (over samples with a reward), loss, kl, entropy, ratio, clip_fraction (over
    what was trained on), of a critic explained_variance, value, value_loss, value_clip_fraction,
    critic_grad_norm, grad_norm, importance_capped, importance_max, rejected (of the weights against the
    engine), kl_coef (where it adapts), prompts_sampled, prompts_used (with dynamic sampling),
    prompts_easy, prompts_hard (with data.difficulty),
    logprob_difference, logprob_difference_max, staleness_difference, routes_differ, routes_unknown (where
    routes are replayed), those of `lorad/driver/sampling/spread.py`, seconds_publish, seconds_attest,
    trainer_tokens_per_second, trainer_memory, trainer_memory_peak (bytes), mfu, host_cpu, host_memory,
    device_utilization, device_memory, device_power (watts). A step of sft or dpo has no rewards, groups and
    ratios; sft has perplexity and token_accuracy, dpo has pair_accuracy, chosen_reward,
    rejected_reward and reward_margin, the difference of these (beta * (logprob - reference) of completions),
    chosen_shift and rejected_shift (logprob - reference, nats per token); with an evaluation each comes with
    held_out_ before it.
    """

    step: int
    attempt: int = 0
    at: float = 0.0
    version: int = 0
    samples: str = ""  # the file of its samples, relative to the run's directory
    metrics: Metrics = {}


class Evaluation(Struct, frozen=True):
    step: int
    attempt: int = 0
    at: float = 0.0
    version: int = 0
    score: float | None = None  # mean over the problems whose reward did not fail
    problems: int = 0
    failed: int = 0
    nll: float | None = None  # of the held-out completions, nats per token
    perplexity: float | None = None  # exp(nll)
    accuracy: float | None = None  # share of held-out pairs that are the right way round
    token_accuracy: float | None = None  # share of their tokens than which no other was more likely
    sets: dict[str, SetScore] = {}  # of eval.sets, by name

    @property
    def figures(self) -> dict[str, float]:
        """Return what was measured, by name: eval, eval/NAME, eval/NAME/pass@4, nll, accuracy."""
        return figures(self.score, self.nll, self.accuracy, self.sets)


class Result(Struct, frozen=True):
    """What a version came to when somebody evaluated it."""

    run: str
    version: int
    sha256: str = ""
    at: float = 0.0
    by: str = ""
    suite: str = "data"  # or lm_eval, inspect
    data: str = ""  # the rows, or the task of the suite
    settings: dict[str, Any] = {}  # reward, sampling and the like
    metrics: dict[str, float] = {}
    problems: int = 0
    failed: int = 0
