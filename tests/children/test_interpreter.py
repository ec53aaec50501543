"""What the doctor learns of another Python by asking it, and what it says of one that gives no answer."""

import sys
from pathlib import Path

from lorad.children.interpreter import Requirements, look

TORCH = Requirements(packages=["torch"], modules=["torch", "torch.not_a_module"])


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
