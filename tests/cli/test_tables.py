"""Tables of the command line: nothing exact is cut at any width.

What commands print is kept in tests/data/tables. `make snapshots` writes those files again; look at what
`git diff` changed before you keep it.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorad.cli.app import app
from lorad.cli.commands.samples import _SAMPLES as SAMPLES
from lorad.cli.commands.samples import _cells as sample_cells
from lorad.cli.commands.serve import print_results
from lorad.cli.listing import show
from lorad.cli.table import Column, cells, table_lines, text_lines
from lorad.client.client import Client
from lorad.records.measured import Result
from lorad.records.runs import Run, Signals
from lorad.records.samples import Sample
from lorad.text import question
from tests.kit.frozen.world import frozen
from tests.kit.pty_kit import on_terminal

__all__ = ["frozen"]
KEPT = Path(__file__).parents[1] / "data/tables"
WIDTHS = (60, 80, 100, 140, 200, None)  # None: piped
COMMANDS = {
    "adapters": ("adapters", "sorter"), "aliases": ("aliases",), "checkpoints": ("checkpoints", "bold-lr"),
    "devices": ("devices",), "list": ("list", "--all"),
    "nodes": ("nodes",), "plot": ("plot", "sorter"), "pools": ("pools",),
    "plots": ("plot", "sorter", "one-answer", "--metric", "entropy"),
    "samples": ("samples", "essays", "-n", "6"), "sample": ("samples", "essays", "--sample", "3"),
    "queue": ("list", "--queue"), "show": ("show", "gsm8k-32k"), "top": ("top",),
    "traffic": ("aliases", "--traffic"),
}  # fmt: skip
Printed = Callable[..., str]


@pytest.fixture
def printed(frozen: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """What a command prints on stdout, on a terminal of this width or into a pipe."""
    monkeypatch.setenv("LORAD_HOME", str(frozen.home.root))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("LINES", "50")

    def run(width: int | None, *arguments: str) -> str:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: width is not None)
        monkeypatch.setenv("COLUMNS", str(width))
        app(list(arguments), standalone_mode=False)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints_is_what_is_kept(
    name: str, printed: Printed, request: pytest.FixtureRequest
) -> None:
    shown = "\n".join(f"== {width or 'piped'}\n{printed(width, *COMMANDS[name])}" for width in WIDTHS)
    if request.config.getoption("update_snapshots"):
        (KEPT / f"{name}.txt").write_text(shown)
    assert shown == (KEPT / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_wider_than_the_terminal(name: str, printed: Printed) -> None:
    for width in (60, 80, 100, 140, 200):
        wide = [line for line in printed(width, *COMMANDS[name]).splitlines() if cells(line) > width]
        assert [line for line in wide if " " in line.strip()] == []


def test_figures_have_names_where_some_are_losses(capsys: pytest.CaptureFixture[str]) -> None:
    rewarded, taught = Run("a", "running", reward=0.5), Run("b", "running", signals=Signals(loss=0.651))
    show([rewarded, taught], [], fold=False)
    header, *rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[header.index("figure")] for row in rows] == ["reward 0.500", "loss 0.651"]
    show([rewarded], [], fold=False)
    assert "0.500" in capsys.readouterr().out.splitlines()[1].split("\t")


def test_a_pipe_gets_all_columns_whole_between_tabs(printed: Printed) -> None:
    header, *rows = [line.split("\t") for line in printed(None, "list").splitlines()]
    waits = next(dict(zip(header, row, strict=True)) for row in rows if row[0] == "waits")
    assert waits["state"] == "queued" and waits["why"].endswith("(pid 40122, carol, 38.2 GiB)")


CHATML = "<|im_start|>system\n{0}<|im_end|>\n<|im_start|>user\n{1}<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "You are a helpful AI assistant named SmolLM."


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (CHATML.format(SYSTEM, "6 + 3?"), "…6 + 3?"),
        (CHATML.format(SYSTEM, "6 + 3?") + "<think>\n", "…6 + 3?"),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|><|start_header_id|>assistant"
         "<|end_header_id|>\n\n", "…Hi?"),
        ("<bos><start_of_turn>user\n6 + 3?<end_of_turn>\n<start_of_turn>model\n", "…6 + 3?"),
        ("<s>[INST] 6 + 3? [/INST]", "…6 + 3?"),
        ("Q: 6 + 3?\nA:", "Q: 6 + 3?\nA:"),
        ("<s>", "<s>"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_question_is_the_last_turn(prompt: str, shown: str) -> None:
    assert question(prompt) == shown


def test_samples_of_a_chat_show_the_question() -> None:
    chat = CHATML.format(SYSTEM * 3, "What is 66 + 93?")
    rows = [Sample(1, prompt=chat, completion="159", answer="159", reward=1.0)]
    lines = table_lines(SAMPLES, sample_cells(rows, grouped=True), 80)
    assert "…What is 66 + 93?" in "\n".join(lines)
    assert "helpful" in "\n".join(table_lines(SAMPLES, sample_cells(rows, grouped=False), None))


EXACT = st.text("abc-@0123456789.é日", min_size=1, max_size=30)
TEXT = st.lists(st.text("abcdefgh,", min_size=1, max_size=14), max_size=20).map(" ".join)


@given(st.lists(st.tuples(EXACT, EXACT, EXACT, TEXT, TEXT), min_size=1, max_size=5), st.integers(20, 160))
def test_what_is_exact_is_never_cut(rows: list[tuple[str, ...]], width: int) -> None:
    columns = ("name", "state", Column("rate", 1), Column("why", kind="fold"), Column("prompt", kind="cut"))
    lines = table_lines(columns, rows, width)
    words = [word for line in lines for word in line.split()]
    assert all(row[0] in words and row[1] in words for row in rows)
    assert "rate" not in lines[0] or all(row[2] in words for row in rows)
    assert all(cells(line) <= max(width, 8 + 2 * 62) for line in lines)


@given(TEXT, st.integers(20, 160))
def test_text_is_broken_between_words(text: str, width: int) -> None:
    lines = text_lines(text, "fold", width)
    shown = " ".join(lines)
    assert len(lines) <= 2 and all(cells(line) <= width for line in lines)
    assert shown == text or (shown.endswith("…") and text.startswith(shown[:-1]))


def test_the_width_is_that_of_the_terminal(frozen: Client) -> None:
    environment = os.environ | {"LORAD_HOME": str(frozen.home.root), "TERM": "xterm"}
    command = [sys.executable, "-m", "lorad", "list"]
    narrow, wide = (on_terminal(command, width, environment) for width in (60, 200))
    assert "\x1b[1mname" in narrow and "owner" not in narrow and "owner" in wide


def test_evaluations_of_the_same_rows_say_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    def result(data: str, score: float, **settings: object) -> Result:
        return Result("sorter", 2, data=data, settings={"n": 1, **settings}, metrics={"score": score})

    exact, near = [{"name": "exact_match"}], [{"name": "near.py:score"}]
    short = result("a.jsonl", 0.5, max_new_tokens=8, temperature=1.0, reward=exact)
    long = result("a.jsonl", 0.75, max_new_tokens=16, temperature=1.0, reward=near)
    print_results([short, long, result("b.jsonl", 0.25, max_new_tokens=4)])
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[:3] for row in rows] == [
        ["version", "data", "settings"],
        ["sorter@2", "a.jsonl", "max_new_tokens 8, reward exact_match"],
        ["sorter@2", "a.jsonl", "max_new_tokens 16, reward near.py:score"],
        ["sorter@2", "b.jsonl", ""],
    ]
    print_results([short])
    assert "settings" not in capsys.readouterr().out
