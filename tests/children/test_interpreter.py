"""What the doctor learns of another Python by asking it, and what it says of one that gives no answer."""

import sys
from pathlib import Path

import pytest

from lorad.children.interpreter import Requirements, look
from lorad.servers.table import SERVERS

TORCH = Requirements(packages=["torch"], modules=["torch", "torch.not_a_module"])


@pytest.mark.system
def test_look_says_which_modules_import() -> None:
    answer = look(Path(sys.executable), {}, TORCH)
    assert isinstance(answer, dict), answer
    assert answer["kernels"]["torch"] is None
    assert "No module named 'torch.not_a_module'" in answer["kernels"]["torch.not_a_module"]
    assert answer["packages"]["torch"] == answer["torch"]


def test_silent_python_is_given_up_in_words(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    assert look(python, {}, TORCH, seconds=0.1) == "it said nothing for 0 s"


@pytest.mark.parametrize("gpus", [0, 2])
def test_modules_for_gpus_are_wanted_there_alone(gpus: int, tmp_path: Path) -> None:
    """SGLang sleeps by its memory saver, without which it would end when it is started."""
    (tmp_path / "torch.py").write_text(
        f"class cuda:\n    device_count = lambda: {gpus}\n    is_available = lambda: {gpus > 0}\n"
        "    get_device_name = lambda index: 'H100'\n"
        "class version:\n    cuda = '13.0'\n__version__ = '2.11'\n"
    )
    saver = Requirements([], [], for_gpus=SERVERS["sglang"].gpu_modules)
    answer = look(Path(sys.executable), {"PYTHONPATH": str(tmp_path)}, saver)
    assert isinstance(answer, dict), answer
    assert {*answer["kernels"]} == ({"flashinfer", "torch_memory_saver"} if gpus else set())
    assert all("No module named" in fault for fault in answer["kernels"].values())
