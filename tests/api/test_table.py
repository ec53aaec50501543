"""Tables: lists of answers that show as tables and become data frames."""

import subprocess
import sys

import pytest

from lorad.api.table import Table
from lorad.records.versions import Checkpoint

FOUR = Table([Checkpoint("a", step, path="x" * 50, created_at=86400.0 * 365 * 30) for step in range(4)])


def test_a_table_is_a_list_of_structs() -> None:
    assert FOUR[1] == [*FOUR][1] and len(FOUR) == 4
    assert isinstance(FOUR[1:3], Table) and FOUR[1:3].column("step") == [1, 2]


def test_rows_have_the_same_keys() -> None:
    rows = Table([{"a": 1}, {"b": 2}], row=dict)
    assert rows.rows() == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_an_unknown_column_is_named() -> None:
    with pytest.raises(KeyError, match="no column 'setp': there are run, step"):
        FOUR.column("setp")


def test_a_long_table_shows_both_ends() -> None:
    shown = repr(Table([{"n": n} for n in range(100)], row=dict)).splitlines()
    assert (shown[1], shown[10], shown[11], shown[-2], shown[-1]) == ("0", "9", "…", "99", "(100 rows)")


def test_text_has_the_columns_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = repr(FOUR).splitlines()
    assert max(map(len, shown)) <= 40 and shown[0].split()[:2] == ["run", "step"]
    assert shown[-1] == "(4 rows, 3 more columns)"


def test_markup_of_a_model_is_escaped() -> None:
    shown = Table([{"<b>": "<script>"}], row=dict)._repr_html_()
    assert ("<script>" not in shown and "&lt;script&gt;" in shown) or "pandas" in sys.modules


def test_a_table_becomes_a_pandas_frame() -> None:
    pytest.importorskip("pandas")
    frame = FOUR.to_pandas()
    assert list(frame["step"]) == [0, 1, 2, 3] and list(frame.columns) == FOUR.columns
    assert "dataframe" in FOUR._repr_html_()


def test_a_table_becomes_a_polars_frame() -> None:
    pytest.importorskip("polars")
    frame = Table([{"n": 1, "x": {"a": 1}}, {"n": 2.5, "x": {}}], row=dict).to_polars()
    assert frame["n"].to_list() == [1.0, 2.5] and frame["x"].to_list() == ['{"a":1}', "{}"]


def test_no_library_of_frames_is_imported_unasked() -> None:
    code = (
        "import sys, lorad; from lorad.api.table import Table; t = Table([{'a': 1}], row=dict);"
        "repr(t), t._repr_html_(), t.rows(); print({'pandas', 'polars', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
