"""lorad init [FILE]: a spec to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lorad.cli.output import note
from lorad.errors import Conflict

app = typer.Typer(add_completion=False)

TEMPLATE = """\
# Run it:            lorad run {file}
# Override a key:    lorad run {file} trainer.lr=3e-5 lora.rank=8
model: {{path: "{model}"}}          # builtin:tiny, a local Hugging Face directory, or a hub id
lora: {{rank: 16, alpha: 32, target_modules: all-linear}}
algorithm: {{name: grpo, group_size: 8}}
data:
  train: "{data}"                 # sort, reverse, a .jsonl or .parquet file, or a hub dataset
  prompts_per_step: 16
reward: exact_match               # exact_match, gsm8k, {{name: regex, pattern: …}}, or path/to/module.py:function
trainer: {{lr: 1.0e-3, steps: 60}}
rollout: {{max_new_tokens: 16, temperature: 1.0}}
eval: {{every: 10, problems: 256}}
checkpoint: {{every: 10, keep: 3}}
# pool: {{threads: 2}}              # on the CPU; else chosen for the model and the load, and kept for all of the run
"""


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="Where to.")] = Path("run.yaml"),
    model: Annotated[str, typer.Option(help="The base model.")] = "builtin:tiny",
    data: Annotated[str, typer.Option(help="The training data.")] = "sort",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a small spec; every key that it leaves out has a default."""
    if file.exists() and not force:
        raise Conflict(f"{file} exists", hint="Choose another name, or --force.")
    file.write_text(TEMPLATE.format(file=file, model=model, data=data))
    note(f"Wrote {file}. Start it with `lorad run {file}`.")
