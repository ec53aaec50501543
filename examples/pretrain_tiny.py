"""Make the base models `builtin:tiny` and `builtin:tiny-moe`: `python examples/pretrain_tiny.py DIR` and
`… DIR --experts 4` (one thread, about two and four CPU minutes).

A 0.6 M parameter Qwen3, or a Qwen3-MoE of 1.1 M of which a token meets 0.6 M, learns the builtin tasks from
a noisy corpus: 70 % of the answers are plausible wrong ones (mostly a copy of the input), so the right answer
is one of several modes that the model knows. Reinforcement learning then has something to elicit. Only
prompts of the train split are used.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lorad.rl.tasks import TASKS, Problem, Split, problem

Model = Qwen3ForCausalLM | Qwen3MoeForCausalLM

SPECIALS = ["<pad>", "<eos>", "<unk>"]
PAD, EOS, UNK = range(3)
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

ROPE_THETA = 10000.0
SEED = 1
STEPS, BATCH = 360, 256
PEAK_LR, WARMUP, COOLDOWN = 3e-3, 50, 0.25
NOISE = 0.70
NOISE_KINDS = {"copy": 0.74, "shuffle": 0.13, "truncate": 0.06, "extend": 0.07}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--experts", type=int, default=0, help="0: an MLP instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(arguments.experts)
    train(model, tokenizer, arguments.steps)
    round_to_bfloat16(model)
    report(model, tokenizer)
    save(model, tokenizer, arguments.directory)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: printable ASCII and the newline; anything else is <unk>. There is no <bos>."""
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(experts: int) -> Model:
    """A fresh model with even sizes and the vocabulary padded to a multiple of 64, as tensor parallelism
    wants them. experts: two of which are as wide as the MLP of a model without any; 0: that one.
    """
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    }
    of, kind, more = (
        (Qwen3MoeConfig, Qwen3MoeForCausalLM, mixture) if experts else (Qwen3Config, Qwen3ForCausalLM, {})
    )
    config = of(
        **more,
        vocab_size=128,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        dtype="float32",
    )
    return kind(config)


def train(model: Model, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Supervised training with the loss on answers only: linear warm-up, constant, linear cool-down."""
    rng = random.Random(SEED)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01, foreach=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        ids, answer_positions = batch(tokenizer, rng, step)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][answer_positions]
        loss = functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][answer_positions])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49:
            print(
                f"step {step + 1}: loss {loss.item():.3f}, {time.process_time():.0f} CPU seconds", flush=True
            )


def learning_rate(step: int, steps: int) -> float:
    return PEAK_LR * min(1.0, (step + 1) / WARMUP, (1 - step / steps) / COOLDOWN + 0.02)


def batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [BATCH, T], right-padded, and a mask [BATCH, T-1] of the positions that predict an answer
    token.
    """
    rows, starts = [], []
    for index in range(step * BATCH, (step + 1) * BATCH):
        example = problem(rng.choice(sorted(TASKS)), "train", SEED, index)
        prompt, answer = tokenizer([example.prompt, corrupt(example, rng)])["input_ids"]
        rows.append(torch.tensor([*prompt, *answer, EOS]))
        starts.append(len(prompt))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    position = torch.arange(1, ids.shape[1])
    return ids, (position >= torch.tensor(starts)[:, None]) & (ids[:, 1:] != PAD)


def corrupt(example: Problem, rng: random.Random) -> str:
    """The right answer, or (with probability NOISE) a plausible wrong one."""
    answer = example.answer
    if rng.random() >= NOISE:
        return answer
    match rng.choices(list(NOISE_KINDS), weights=list(NOISE_KINDS.values()))[0]:
        case "copy":
            return example.prompt[2:-1]
        case "shuffle":
            return "".join(rng.sample(answer, len(answer)))
        case "truncate":
            return answer[:-1]
        case _:
            return answer + rng.choice(answer)


def round_to_bfloat16(model: Model) -> None:
    """Keep float32 storage but only values that bfloat16 holds,
    so that both dtypes are the same checkpoint.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def report(model: Model, tokenizer: PreTrainedTokenizerFast) -> None:
    for task in sorted(TASKS):
        print(
            f"{task}: greedy exact match {exact_match(model, tokenizer, task, 'validation', 256):.3f} "
            "(validation)"
        )


@torch.no_grad()
def exact_match(
    model: Model, tokenizer: PreTrainedTokenizerFast, task: str, split: Split, count: int
) -> float:
    """Share of `count` problems whose greedy completion is the answer followed by <eos>."""
    problems = [problem(task, split, 0, index) for index in range(count)]
    prompts = tokenizer(
        [p.prompt for p in problems], padding=True, return_tensors="pt", return_token_type_ids=False
    )
    output = model.generate(**prompts, do_sample=False, max_new_tokens=16)
    texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :])
    hits: int = sum(text.startswith(p.answer + "<eos>") for text, p in zip(texts, problems, strict=True))
    return hits / count


def save(model: Model, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a Hugging Face directory that transformers 4 and 5, vLLM and SGLang read alike."""
    model.generation_config = GenerationConfig(pad_token_id=PAD, eos_token_id=EOS)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
    count = {"num_experts": model.config.num_experts} if isinstance(model, Qwen3MoeForCausalLM) else {}
    merge_json(directory / "config.json", {"rope_theta": ROPE_THETA, **count})
    merge_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def merge_json(path: Path, entries: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
