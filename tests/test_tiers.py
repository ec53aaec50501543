"""`make test` does not import a file whose tests are all of the second tier, and imports all others."""

from pathlib import Path

import pytest

from tests.conftest import is_all_second_tier

WHOLE = (
    "pytestmark = pytest.mark.system\n",
    "pytestmark = [pytest.mark.system, pytest.mark.skipif(True, reason='')]\n",
    "pytestmark = [\n    pytest.mark.anyio,\n    pytest.mark.system,\n]\n",
)
IN_PART = (
    "@pytest.mark.system\ndef test(): ...\n",
    "pytestmark = pytest.mark.anyio\n\n@pytest.mark.system\ndef test(): ...\n",
    "pytestmark = pytest.mark.system(but='a')\n",
)


@pytest.mark.parametrize("text", [*WHOLE, *IN_PART])
def test_a_file_is_left_out_only_whole(text: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(text)
    assert is_all_second_tier(tmp_path / "test_it.py") == (text in WHOLE)
