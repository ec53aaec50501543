"""The table of `make bench`: every row is measured, and judged the right way round."""

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import bench
from benchmarks.bench import line
from benchmarks.rows import MEASURES, ROWS, Row
from benchmarks.table import cells
from benchmarks.training.pairs import PAIRS, spec_of
from lorad.rl.doubts import refuse_contradictions
from lorad.spec.model import convert


def turns(**figures: list[float]) -> list[dict[str, object]]:
    return [{"measure": "m", "side": "lorad", "figures": figures, "peak_rss_mb": 100.0}]


def judged(row: Row, lorad: float, peer: float) -> tuple[object, str]:
    made = line(row, turns(lorad=[lorad], peer=[peer]))
    return made["reached"], cells(made)[4]


def row(judgement: str, target: float) -> Row:
    return Row("what", "m", "lorad", judgement, "peer", target=target, peer_side="lorad")  # type: ignore[arg-type]


def test_every_row_has_a_measure_with_its_peer() -> None:
    for each in ROWS:
        assert each.peer_side in MEASURES[each.measure].sides or not each.peer
    assert {each.measure for each in ROWS} == set(MEASURES)


def test_every_measure_is_a_module() -> None:
    assert all(find_spec(measure.command("lorad")[0]) for measure in MEASURES.values())


def test_ratios_are_times_better() -> None:
    assert judged(row("times less", 2.0), 10.0, 25.0) == (True, "2.50x")
    assert judged(row("times more", 2.0), 10.0, 25.0) == (False, "0.40x")
    assert judged(row("share", 0.5), 10.0, 25.0) == (False, "40%")
    assert judged(row("cost", 1.3), 30.0, 25.0) == (True, "1.20x")
    assert judged(row("at most", 5.0), 10.0, 25.0)[0] is False


def test_the_median_of_all_rounds_counts() -> None:
    rounds = turns(lorad=[1.0, 2.0, 9.0], peer=[4.0]) + turns(lorad=[2.0, 2.0], peer=[4.0])
    assert line(row("times less", 2.0), rounds)["lorad"] == 2.0


@pytest.mark.parametrize(
    ("only", "measures"),
    [
        ("decode", ["decode"]),
        ("decode-", ["decode-bf16"]),
        ("share,train-b", ["train-bf16", "share"]),
        ("mixed", ["mixed-r8", "mixed-r16"]),
    ],
)
def test_whole_names_choose_one_measure(
    monkeypatch: pytest.MonkeyPatch, only: str, measures: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--only", only])
    assert bench.parse().only == measures


def test_unknown_measures_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--only", "decode,nonsense"])
    with pytest.raises(SystemExit):
        bench.parse()
    assert "there is no measure nonsense; choose from" in capsys.readouterr().err


def test_specs_beside_the_peer_are_allowed() -> None:
    specs = [convert(spec_of(pair, steps=40, seed=1)) for pair in PAIRS]
    for spec in specs:
        refuse_contradictions(spec)
    assert len({(spec.algorithm.name, spec.algorithm.parts) for spec in specs}) == len(PAIRS)


def test_a_bench_goes_on_where_it_broke_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = list[int]()

    def take_turn(measure: object, side: str, number: int, *_: object) -> dict[str, object]:
        asked.append(number)
        if len(asked) == 2:
            raise SystemExit("it is broken off")
        return {"figures": {"worst": [1.1], "won": [1.2]}, "peak_rss_mb": 3.0, "side": side}

    monkeypatch.setattr(bench, "take_turn", take_turn)
    monkeypatch.setattr(bench, "machine", lambda: {"cpu": "Some CPU AVX2"})
    options = Namespace(keep=tmp_path / "turns", only=["products"], rounds=2, repeats=1)
    with pytest.raises(SystemExit):
        bench.take_turns(options, tmp_path)
    assert [turn["round"] for turn in bench.take_turns(options, tmp_path)] == [0, 1]
    assert asked == [0, 1, 1]
    kept = (tmp_path / "turns").read_text()
    (tmp_path / "turns").write_text(kept.replace('"cpu": "', '"cpu": "Another '))
    bench.take_turns(options, tmp_path)
    assert asked == [0, 1, 1, 0, 1]
