"""Who asks for a dtype that the machine computes slowly is told so before the run."""

from pathlib import Path

import pytest

from lorad.preflight.trainers import check_dtype
from lorad.spec.model import convert


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ("flags\t\t: fpu avx2 fma", True),
        ("flags\t\t: fpu avx512f avx512_bf16", False),
        ("flags\t\t: avx512f amx_bf16", False),
        ("Features\t: fp asimd bf16", False),
        ("Features\t: fp asimd", True),
        ("", False),
    ],
)
def test_bfloat16_without_hardware_is_warned_of(flags: str, warns: bool, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nbogomips\t: 4000\n")
    bfloat16, auto = (convert({"model": {"dtype": dtype}}) for dtype in ("bfloat16", "auto"))
    assert bool(check_dtype(bfloat16, "cpu", tmp_path)) is warns
    assert not check_dtype(auto, "cpu", tmp_path) and not check_dtype(bfloat16, "cuda:0", tmp_path)
