"""The peers: TRL's GRPOTrainer, and transformers' generate and forward, with a PEFT adapter on the same base.

Switches that would only slow a peer down on this machine are off: gradient checkpointing, bf16 where fp32 is
measured, logging, saving, and the end-of-sequence checks where every sample has a fixed length.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, TrainerCallback

from benchmarks.kit.workload import (
    ALPHA,
    GROUP,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    PROMPTS,
    RANK,
    TINY,
    Figures,
    Stopwatch,
    exact_match,
)
from lorad.rl.tasks import Problem

warnings.simplefilter("ignore")  # the peers', not ours to mend

ADAPTER_STD = 0.01
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def lora(rank: int = RANK) -> LoraConfig:
    return LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )


def peft_model(directory: Path, dtype: str = "fp32", rank: int = RANK) -> Any:
    """The base with a random adapter, in eval mode; samples never end by themselves."""
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype]), lora(rank)
    ).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=ADAPTER_STD)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@contextmanager
def mended(model: Any) -> Iterator[None]:
    """transformers multiplies lm_head with a slice that is not contiguous, row by row with a copy of the
    weight for each. Within, the slice is made contiguous first: the peer as it could be."""
    head = model.get_base_model().lm_head
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
    try:
        yield
    finally:
        hook.remove()


def generate(
    model: Any, prompts: Sequence[Sequence[int]] | np.ndarray, new_tokens: int, **options: Any
) -> int:
    """Sample a padded batch; returns the width of what was made."""
    ids, mask = padded(prompts)
    output = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=new_tokens, **options
    )
    return int(output.shape[1] - ids.shape[1])


def padded(prompts: Sequence[Sequence[int]] | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), int64 [rows, longest], padded on the left."""
    longest = max(len(row) for row in prompts)
    ids = torch.tensor([[0] * (longest - len(row)) + [int(token) for token in row] for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    return ids, mask


def tokenized(problems: Sequence[Problem]) -> list[list[int]]:
    ids: list[list[int]] = AutoTokenizer.from_pretrained(TINY)([problem.prompt for problem in problems])[
        "input_ids"
    ]
    return ids


class LengthReached(StoppingCriteria):
    """Ends each row of a batch at a length of its own; transformers pads it from there on."""

    def __init__(self, prompt: int, lengths: Sequence[int]) -> None:
        self.ends = prompt + torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


class TimedTrainer(trl.GRPOTrainer):
    """Splits a step's CPU time: generation here, the whole step in `StepTimes`."""

    def attach(self, figures: Figures) -> None:
        self.figures = figures

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        watch = Stopwatch()
        result = super()._generate(*args, **kwargs)
        self.figures["rollout"].append(watch.lap())
        return result


class StepTimes(TrainerCallback):
    """CPU seconds from one step's end to the next one's."""

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self.watch = Stopwatch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.figures["step"].append(self.watch.lap())


def trl_steps(
    problems: Sequence[Problem],
    steps: int,
    seed: int = 42,
    held_out: Sequence[Problem] = (),
    **settings: Any,
) -> Figures:
    """CPU seconds of GRPO steps on the tiny base and of their rollouts, and their mean rewards; with
    `held_out` also the greedy score on these problems at the end.

    seed: TRL's own; it draws the adapter and the samples. settings: of the loss, as GRPOConfig has them.
    """
    figures: Figures = {"step": [], "rollout": [], "reward": []}

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scores = exact_match(completions, answer)
        figures["reward"].append(sum(scores) / len(scores))
        return scores

    with tempfile.TemporaryDirectory() as directory:
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(TINY, padding_side="left"),
            reward_funcs=reward,
            args=trl_config(directory, steps, seed, settings),
            train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems]),
            peft_config=lora(),
            callbacks=[StepTimes(figures)],
        )
        trainer.attach(figures)
        trainer.train()
        if held_out:
            figures["eval"] = [greedy(trainer.model, held_out)]
    return figures


def trl_on_rows(
    method: str,
    rows: Sequence[Mapping[str, str]],
    steps: int,
    seed: int,
    held_out: Sequence[Problem],
    **settings: Any,
) -> Figures:
    """CPU seconds of steps of SFTTrainer or DPOTrainer on the tiny base, which take the rows in order, and
    the greedy score at the end.

    settings: of its config, beside what the other peers have.
    """
    trainer_of, config_of = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
    }[method]
    figures: Figures = {"step": []}
    with tempfile.TemporaryDirectory() as directory:
        config = config_of(
            **_usual(directory, steps, seed),
            max_length=None,
            train_sampling_strategy="sequential",
            **settings,
        )
        trainer: Any = trainer_of(
            model=AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(TINY),
            args=config,
            train_dataset=Dataset.from_list([dict(row) for row in rows]),
            peft_config=lora(),
            callbacks=[StepTimes(figures)],
        )
        trainer.train()
        figures["eval"] = [greedy(trainer.model, held_out)]
    return figures


def greedy(model: Any, problems: Sequence[Problem]) -> float:
    """Exact match of greedy completions."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids, mask = padded([tokenizer(problem.prompt)["input_ids"] for problem in problems])
    with torch.no_grad():
        output = model.eval().generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_NEW_TOKENS
        )
    texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(exact_match(texts, [problem.answer for problem in problems])) / len(problems)


def trl_config(directory: str, steps: int, seed: int, settings: dict[str, Any]) -> trl.GRPOConfig:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": PROMPTS * GROUP,
        "num_generations": GROUP,
        "max_completion_length": MAX_NEW_TOKENS,
        "learning_rate": LEARNING_RATE,
        "temperature": 1.0,
        "beta": 0.0,
        "shuffle_dataset": False,
    }
    return trl.GRPOConfig(**_usual(directory, steps, seed), **defaults | settings)


def _usual(directory: str, steps: int, seed: int) -> dict[str, Any]:
    """What the configs of all trainers have in common."""
    assert ALPHA == 2 * RANK
    return {
        "output_dir": directory,
        "max_steps": steps,
        "seed": seed,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
