"""`make bench-memory`: the most memory of a training pass over one long sample, by trainers of several ranks.

    python -m benchmarks.training.memory [--tokens 1024 16384] [--only megatron-2] [--before DIR]

A random model of two small layers with 151,936 words, so that the logits are what counts. Each figure is of
fresh processes: by how much the resident memory of the largest rank grew at most during one pass forward and
backward of `forward_backward`, with activations recomputed. "whole" makes the logits of all tokens in one
chunk; with `--before` it is what another checkout of lorad needs, one that did not make them in chunks. Where
the machine has no room for that, it is continued along the last two that were measured, marked with ~. "no
head" is a pass that ends before the output layer.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.training.memory_rank import Figures, Settings
from tests.trainers.real.start import MEGATRON_CPU, VARIABLE, python_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("memory_rank.py")
VOCAB, MB, WHOLE = 151_936, 1 << 20, 10**9
TOKENS = (1024, 2048, 4096, 16384)
CASES = ("fsdp-1", "fsdp-2", "fsdp-cp2", "megatron-1", "megatron-2")
ARRAYS = 3.5  # of tokens x vocabulary that whole logits take at most, with what else there is


def write_model(directory: Path, heads: int) -> None:
    """One head on each rank: without Transformer Engine Megatron holds tokens x tokens for each."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=1 << 15,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)


def measured(
    case: str, tokens: int, rows: int | None = None, *, headless: bool = False, tree: Path = ROOT
) -> Figures:
    """The figures of the rank that grew most. tree: the checkout of lorad that runs."""
    backend, _, ranks = case.partition("-")
    world, python = int(ranks.removeprefix("cp")), python_of(backend) or sys.executable
    cp = world if ranks.startswith("cp") else 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = f"{tree}:{MEGATRON_CPU}" if backend == "megatron" else str(tree)
    tp = world if backend == "megatron" else 1
    with tempfile.TemporaryDirectory(prefix="lr-memory-") as name:
        directory = Path(name)
        write_model(directory / "model", max(tp, cp))
        settings = Settings(backend, tp, tokens, rows, headless, cp)
        (directory / "settings.json").write_bytes(msgspec.json.encode(settings))
        running = [
            subprocess.Popen(
                [python, str(SCRIPT), str(rank), str(world), str(directory)],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(world)
        ]  # fmt: skip
        said = [process.communicate()[0] for process in running]
        if any(process.returncode for process in running):
            raise SystemExit("\n".join(said))
        told = [(directory / f"{rank}.json").read_bytes() for rank in range(world)]
    return max((msgspec.json.decode(one, type=Figures) for one in told), key=lambda one: one.bytes)


def has_room(case: str, tokens: int) -> bool:
    """Return whether the whole logits of all ranks take at most half of what others leave."""
    return bool(int(case[-1]) * tokens * VOCAB * 4 * ARRAYS < 0.5 * psutil.virtual_memory().available)


def whole(case: str, tokens: list[int], before: Path | None) -> list[tuple[float, str]]:
    """(MB, its mark) of each length."""
    found: list[tuple[float, str]] = []
    for place, length in enumerate(tokens):
        if has_room(case, length):
            made = measured(case, length, tree=before) if before else measured(case, length, WHOLE)
            found.append((made.bytes / MB, ""))
        elif place < 2:
            raise SystemExit(f"{case}: no room for whole logits of {length} tokens")
        else:
            (low, _), (high, _) = found[-2:]
            slope = (high - low) / (tokens[place - 1] - tokens[place - 2])
            found.append((high + slope * (length - tokens[place - 1]), "~"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--before", type=Path)
    args = parser.parse_args()
    if any(case.startswith("megatron") for case in args.only) and python_of("megatron") is None:
        raise SystemExit(f"{VARIABLE} names no interpreter: `make bench-memory` installs Megatron")
    table = Table("ranks", "tokens", "whole MB", "chunks MB", "ratio", "no head MB", "seconds")
    for case in args.only:
        before = whole(case, args.tokens, args.before)
        for tokens, (megabytes, mark) in zip(args.tokens, before, strict=True):
            now, floor = measured(case, tokens), measured(case, tokens, headless=True)
            ratio = now.bytes / MB / megabytes
            table.add_row(
                case, f"{tokens:,}", f"{mark}{megabytes:,.0f}", f"{now.bytes / MB:,.0f}",
                f"{ratio:.3f}", f"{floor.bytes / MB:,.0f}", f"{now.seconds:.0f}",
            )  # fmt: skip
            Console().print(f"{case} {tokens}: {mark}{megabytes:.0f} -> {now.bytes / MB:.0f} MB")
    Console().print(table)


if __name__ == "__main__":
    main()
