"""Specs to begin with, which `lorad init` writes and the TUI's form of a new run offers."""

from dataclasses import dataclass

from lorad.spec.data import GENERATED

TASKS = ("sort", "reverse", "lookup")
"""The builtin tasks, which have held-out problems of their own."""


@dataclass(frozen=True)
class _Template:
    """A spec as text, with {file}, {model}, {data} and what depends on them to be filled in.

    model, data: the usual ones.
    """

    name: str
    says: str
    model: str
    data: str
    text: str

    def filled(self, file: str = "run.yaml", *, model: str | None = None, data: str | None = None) -> str:
        """Return the template's YAML; `file` is its future name, for its comments.

        The numbers that fit the built-in base are written for that alone, and evaluations where there are
        held-out problems.
        """
        base = model or self.model
        rows = data or self.data
        is_tiny = base.startswith("builtin:")
        has_held_out = rows in TASKS or rows.startswith(GENERATED)
        return self.text.format(
            file=file,
            model=base,
            data=rows,
            rate="lr: 1.0e-3, " if is_tiny else "",
            of_rate="" if is_tiny else "      # lr: what fits the model, `lorad run` prints it",
            tokens=16 if is_tiny else 256,
            eval="eval: {every: " if has_held_out else "# eval: {every: ",
            of_eval="" if has_held_out else "   # with held-out rows in data.eval",
        )


_HEAD = """\
# Run it:            lorad run {file}
# Override a key:    lorad run {file} trainer.lr=3e-5 lora.rank=8
"""
SMALL = _Template(
    "small",
    "the built-in base learns to sort, on a CPU in minutes",
    "builtin:tiny",
    "sort",
    _HEAD
    + """\
model: {{path: "{model}"}}          # builtin:tiny, a local Hugging Face directory, or a hub id
lora: {{rank: 16, alpha: 32, target_modules: all-linear}}
algorithm: {{name: grpo, group_size: 8}}
data:
  train: "{data}"                 # sort, reverse, a .jsonl, .parquet or .csv file, or a hub dataset
  prompts_per_step: 16
reward: exact_match               # exact_match, gsm8k, {{name: regex, pattern: …}}, or module.py:function
trainer: {{{rate}steps: 60}}{of_rate}
rollout: {{max_new_tokens: {tokens}, temperature: 1.0}}
{eval}10, problems: 256}}{of_eval}
checkpoint: {{every: 10, keep: 3}}
# pool: {{threads: 2}}              # on the CPU; else chosen for the model and the load, for the whole run
""",
)
_GPU = _Template(
    "gpu",
    "a model of your own on one GPU: FSDP trains, vLLM samples",
    "Qwen/Qwen3-4B",
    "train.jsonl",
    _HEAD
    + """\
model: {{path: "{model}"}}          # a local Hugging Face directory, or a hub id
lora: {{rank: 32, alpha: 32, target_modules: all-linear}}
algorithm: {{group_size: 8, clip: [0.2, 0.28]}}
data:
  train: "{data}"                 # lines of {{"prompt": …, "answer": …}}; data.prompt_key, data.answer_key
  prompts_per_step: 16
  max_prompt_tokens: 512
reward: gsm8k                     # exact_match, gsm8k, {{name: regex, pattern: …}}, or module.py:function
trainer: {{backend: fsdp, steps: 200, activation_checkpointing: true}}     # lr: what fits the model
rollout: {{backend: vllm, max_new_tokens: 1024, temperature: 1.0}}
{eval}20, problems: 256}}{of_eval}
checkpoint: {{every: 20, keep: 3}}
""",
)
_GPUS = _Template(
    "gpus",
    "the same on four GPUs: Megatron trains, SGLang samples",
    "Qwen/Qwen3-4B",
    "train.jsonl",
    _HEAD
    + """\
model: {{path: "{model}"}}          # a local Hugging Face directory, or a hub id
lora: {{rank: 32, alpha: 32, target_modules: all-linear}}
algorithm: {{group_size: 8, clip: [0.2, 0.28]}}
data:
  train: "{data}"                 # lines of {{"prompt": …, "answer": …}}; data.prompt_key, data.answer_key
  prompts_per_step: 16
reward: gsm8k                     # exact_match, gsm8k, {{name: regex, pattern: …}}, or module.py:function
trainer:                          # lr: what fits the model, `lorad run` prints it
  backend: megatron
  tp: 2
  dp: 2
  steps: 200
  activation_checkpointing: true
rollout: {{backend: sglang, servers: 4, max_new_tokens: 2048, temperature: 1.0}}
{eval}20, problems: 256}}{of_eval}
checkpoint: {{every: 20, keep: 3}}
pool: {{memory_fraction: 0.7}}
""",
)
TEMPLATES = {template.name: template for template in (SMALL, _GPU, _GPUS)}
