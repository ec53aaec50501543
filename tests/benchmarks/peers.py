"""The peer: TRL's GRPOTrainer, and Hugging Face generate, with a PEFT adapter on the same base.

Switches that would only slow the peer down on this machine are off: gradient checkpointing, bf16, logging, saving.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.benchmarks.workload import (
    ALPHA,
    FORCED_TOKENS,
    GROUP,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    PROMPTS,
    RANK,
    TINY,
    WARM_UP,
    Report,
    Stopwatch,
    arguments,
    exact_match,
    problems_of,
)

LORA = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


class TimedTrainer(trl.GRPOTrainer):
    """Splits a step's CPU time: generation here, the rest of the step in `StepTimes`."""

    def attach(self, report: Report) -> None:
        self.report = report

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        watch = Stopwatch()
        result = super()._generate(*args, **kwargs)
        self.report.rollout_seconds.append(watch.lap())
        return result


class StepTimes(TrainerCallback):
    """CPU seconds from one step's end to the next one's."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.watch = Stopwatch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report.step_seconds.append(self.watch.lap())


def config(directory: str, steps: int) -> trl.GRPOConfig:
    return trl.GRPOConfig(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=MAX_NEW_TOKENS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


def steps(count: int) -> Report:
    """`count` GRPO steps."""
    report = Report("trl", trl.__version__)
    problems = [problem for step in range(count + WARM_UP) for problem in problems_of(step)]

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scores = exact_match(completions, answer)
        report.rewards.append(sum(scores) / len(scores))
        return scores

    with tempfile.TemporaryDirectory() as directory:
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(TINY, padding_side="left"),
            reward_funcs=reward,
            args=config(directory, count + WARM_UP),
            train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems]),
            peft_config=LORA,
            callbacks=[StepTimes(report)],
        )
        trainer.attach(report)
        trainer.train()
    del report.step_seconds[:WARM_UP], report.rollout_seconds[:WARM_UP]
    return report


def rollout(count: int) -> Report:
    """`count` calls of generate: 128 sequences of `FORCED_TOKENS` tokens with the adapter active."""
    report = Report("trl", trl.__version__)
    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), LORA).eval()
    for call in range(count + WARM_UP):
        prompts = [p.prompt for p in problems_of(call) for _ in range(GROUP)]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        watch = Stopwatch()
        output = model.generate(
            **inputs, do_sample=True, top_k=0, max_new_tokens=FORCED_TOKENS, min_new_tokens=FORCED_TOKENS
        )
        seconds = watch.lap()
        made = (output.shape[1] - inputs["input_ids"].shape[1]) * output.shape[0]
        assert made == PROMPTS * GROUP * FORCED_TOKENS, f"{made} tokens were made"
        report.tokens_per_second.append(made / seconds)
    del report.tokens_per_second[:WARM_UP]
    return report


def main() -> None:
    warnings.simplefilter("ignore")  # the peer's, not ours to mend
    torch.manual_seed(0)
    measure, count = arguments()
    {"step": steps, "rollout": rollout}[measure](count).print()


if __name__ == "__main__":
    main()
