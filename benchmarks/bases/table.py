"""Which path trains which family of bases: a run of its own for each, or what `lorad check` refuses it for.

Each family is a tiny random checkpoint in the form of its repositories. A run works where its versions are
attested and transformers with PEFT gives its samples the same log-probabilities. Anything else is a failure,
with which this exits.
"""

import argparse
import json
import re
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer

from lorad.adapters.peft import read_peft
from tests.kit.world import COLD, World, world
from tests.models.bases import FAMILIES, write_spoken_base
from tests.models.on_peft import logprobs, put_on_peft
from tests.trainers.real.pairs import configured, missing

_PATHS = {
    "fsdp x transformers": ("fsdp", "transformers"),
    "fsdp x vllm": ("fsdp", "vllm"),
    "fsdp x sglang": ("fsdp", "sglang"),
    "builtin": ("builtin", "builtin"),
    "megatron x transformers": ("megatron", "transformers"),
}
_ROUNDING = 1e-4
_LEAST = 1e-3  # that a trained adapter moves a log-probability
_REFUSED = 2  # what `lorad check` exits with
_BEGIN, _END = "<!-- made by make bases -->", "<!-- end of it -->"
_SPEC = """
lora: {rank: 4, alpha: 8}
algorithm: {group_size: 8}
reward: {name: regex, pattern: "^[0-9]"}
data: {train: sort, prompts_per_step: 8}
trainer: {lr: 1.0e-2, steps: 3}
rollout: {max_new_tokens: 4}
eval: {every: 0}
checkpoint: {every: 3}
"""


def cell(made: World, family: str, path: str, excluded: str = "") -> str:
    """Check a family on a path, and run it. A refused one is tried without the linears that its remedy names.

    Raises AssertionError for a failure.
    """
    trainer, engine = _PATHS[path]
    base = made.root / family
    on = [f"model.path={base}", f"trainer.backend={trainer}", f"rollout.backend={engine}"]
    if excluded:
        on.append(f"lora.exclude_modules=[{excluded}]")
    spec = made.spec(_SPEC)
    begun = time.monotonic()
    try:
        made.lorad("check", spec, *on)
    except AssertionError:
        told = made.lorad("check", spec, *on, expect=_REFUSED).stderr
        seconds = (time.monotonic() - begun) / 2  # it was asked twice
        lines = [line for line in told.splitlines() if line.startswith("error: ")]
        assert lines, f"it was refused without a reason: {told}"
        refusal = f"refused in {seconds:.0f} s: {lines[0].removeprefix('error: ').replace(f'{base}', 'BASE')}"
        remedy = re.search(r"lora\.exclude_modules: \[(.*?)\]", told)
        return f"{refusal}; without them {cell(made, family, path, remedy[1])}" if remedy else refusal
    name = f"{family}-{trainer}-{engine}".replace("_", "-")
    made.lorad("run", spec, *on, "--name", name, "--wait")
    run = made.client.show(name)
    assert (run.reason, run.step) == ("completed", 3), f"{run.reason}: {run.detail}"
    attested = [version.attested for version in made.client.adapters(name)]
    assert attested == ["passed"] * 4, f"versions are {attested}"
    error = _error(made, family, name)
    assert error < _ROUNDING, f"{error:.1e} from transformers with PEFT"
    return f"works: 3 steps, attested, {error:.0e}"


def _error(made: World, family: str, run: str) -> float:
    """Return how far log-probabilities of the last step are at most from transformers' with PEFT."""
    made.lorad("export", f"{run}@2", made.root / run)
    kind = getattr(transformers, FAMILIES[family][0])
    base = kind.from_pretrained(made.root / family, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(made.root / family)
    adapter = read_peft(made.root / run, base=None)
    texts = []
    for sample in made.client.samples(run, step=3)[::4]:
        assert sample.version == f"{run}@2"
        texts.append((tokenizer(sample.prompt)["input_ids"], sample.tokens, np.array(sample.logprobs)))
    before = [logprobs(base, prompt, tokens) for prompt, tokens, _ in texts]
    if any(".experts." in module for module in adapter.config.modules):  # PEFT has no place for them
        made.lorad("export", f"{run}@2", made.root / f"{run}-merged", "--merge")
        model = kind.from_pretrained(made.root / f"{run}-merged", dtype=torch.float32).eval()
    else:
        model, _ = put_on_peft(base, adapter.config, adapter.tensors)
    after = [logprobs(model, prompt, tokens) for prompt, tokens, _ in texts]
    moved = max(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True))
    assert moved > _LEAST, f"the adapter moves log-probabilities by {moved:.1e} alone"
    return max(float(np.abs(a - text[2]).max()) for a, text in zip(after, texts, strict=True))


def render(rows: list[list[str]]) -> str:
    """Return the table in Markdown, with each reason for a refusal once below it."""
    reasons: dict[str, int] = {}

    def numbered(refusal: re.Match[str]) -> str:
        return f"refused ({reasons.setdefault(refusal[1], len(reasons) + 1)})"

    lines = [" | ".join(rows[0]), " | ".join(["---"] * len(rows[0]))]
    for family, kind, *cells in rows[1:]:
        architecture = getattr(transformers, kind.strip("`"))
        names = rf"\b({architecture.__name__}|{family}|{architecture.config_class.model_type})\b"
        texts = [re.sub(names, "FAMILY", text) for text in cells]
        cells = [re.sub(r"refused in \d+ s: ([^;]+)", numbered, text) for text in texts]
        lines.append(" | ".join([family, kind, *cells]))
    table = "\n".join(f"| {line} |" for line in lines)
    return "\n".join([table, "", *(f"{number}. {reason}" for reason, number in reasons.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--paths", nargs="+", choices=_PATHS, help="all whose interpreters are named")
    parser.add_argument("--page", type=Path, help="a page whose table is replaced")
    args = parser.parse_args()
    paths = args.paths or [path for path, backends in _PATHS.items() if not missing(*backends)]
    if absent := missing(*(backend for path in paths for backend in _PATHS[path])):
        raise SystemExit(f"{', '.join(absent)} must name an interpreter: see .ci/setup-engines")
    transformers.utils.logging.disable_progress_bar()
    rows = [["family", "class", *paths]]
    failures = 0
    for family in args.only:
        row = [family, f"`{FAMILIES[family][0]}`"]
        with world(COLD) as made:
            made.home.root.mkdir(parents=True)
            backends = {backend for path in paths for backend in _PATHS[path]}
            config = configured(*backends)
            for backend in config.values():
                backend["env"].pop("SGLANG_DISABLED_MODEL_ARCHS", "")  # all models but those of builtin:tiny
            made.home.config.write_text(json.dumps({"backends": config}))
            write_spoken_base(made.root / family, family)
            for path in paths:
                try:
                    row.append(cell(made, family, path))
                except Exception as error:
                    failures += 1
                    row.append(f"FAILED: {' '.join(str(error).split())[-300:]}")
        print(" | ".join(row), flush=True)
        rows.append(row)
    table = render(rows)
    print(f"\n{table}")
    if args.page and not failures:
        text = args.page.read_text()
        head, rest = text.split(_BEGIN)
        args.page.write_text(f"{head}{_BEGIN}\n{table}\n\n{_END}{rest.split(_END)[1]}")
    if failures:
        raise SystemExit(f"{failures} rows are neither a run that works nor a refusal")


if __name__ == "__main__":
    main()
