"""lorad sums gradients over ranks and shards Adam by itself; Megatron's own way to do that gives the same
adapter.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lorad.adapters.peft import read_peft, write_peft
from lorad.models.directory import linear_shapes, read_config
from tests.conformance.reference import write_random_model
from tests.kit.fakes.random_adapters import random_adapter
from tests.trainers.real.start import MEGATRON_CPU

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("own_optimizer.py")


def run_ranks(python: str, directory: Path, world: int) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{MEGATRON_CPU}", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [python, str(SCRIPT), str(rank), str(world), str(directory)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    said = [rank.communicate(timeout=1800)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, said


# CI compares what Megatron trains with what the builtin trainer does: test_gates
@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_steps_equal_those_of_megatrons_optimizer(megatron_python: str, tmp_path: Path, world: int) -> None:
    shapes = linear_shapes(read_config(write_random_model(tmp_path / "model")))
    (tmp_path / "start").mkdir()
    write_peft(random_adapter(shapes, 1), tmp_path / "start", "base")
    run_ranks(megatron_python, tmp_path, world)
    start, ours = read_peft(tmp_path / "start").tensors, load_file(tmp_path / "lorad.safetensors")
    theirs = load_file(tmp_path / "megatron.safetensors")
    assert ours.keys() == theirs.keys() == start.keys()
    assert max(np.abs(ours[name] - start[name]).max() for name in ours) > 1e-2
    assert max(np.abs(ours[name] - theirs[name]).max() for name in ours) < 1e-5
