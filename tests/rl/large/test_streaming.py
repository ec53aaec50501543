"""Rows that are read while a run trains: of a hub dataset, from a stand-in of the hub, and of files."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.rl.completions.targets import load_held_out, load_train
from lorad.rl.data import Dataset, Example, load_data, load_eval
from lorad.rl.doubts import refuse_contradictions
from lorad.rl.streaming import reader
from lorad.rl.streaming.pinned import commits, pinned
from lorad.rl.streaming.reader import newest_commit
from lorad.rl.streaming.stream import Bookmark
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data
from lorad.spec.model import convert
from tests.kit.fakes.hub import NAME, Hub, hub

ROWS = [{"prompt": f"S:{number:03d}=", "answer": str(number)} for number in range(120)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def files(rows: list[dict[str, Any]]) -> dict[str, bytes]:
    parts = {f"data/train-{n:05d}-of-00003.jsonl": lines(rows[n * 40 : n * 40 + 40]) for n in range(3)}
    return parts | {"data/test-00000-of-00001.jsonl": lines([{"prompt": "S:9=", "answer": "9"}] * 9)}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("builtin:tiny"))


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    datasets = pytest.importorskip("datasets")
    import huggingface_hub.constants
    from huggingface_hub import hf_file_system

    with hub(files(ROWS)) as made:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", made.address)
        template = f"{made.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", made.address)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setattr(reader, "_PAUSES", (0.0, 0.0, 0.0))
        patient = SimpleNamespace(sleep=lambda seconds: None, time=time.time)  # it tries six times itself
        monkeypatch.setattr("huggingface_hub.utils._http.time", patient)
        hf_file_system.HfFileSystem.clear_instance_cache()
        yield made


def data(source: str = NAME, **settings: Any) -> Data:
    given: dict[str, Any] = {"train": source, "streaming": True, "buffer": 16, **settings}
    return Data(**given)


def opened(tokenizer: Tokenizer, chosen: Data, cwd: Path = Path(), seed: int = 0) -> Dataset:
    return load_data(chosen.train, "train", chosen, tokenizer, seed, cwd)


def prompts(examples: list[Example]) -> list[str]:
    return [example.prompt for example in examples]


def a_file(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))
    return "rows.jsonl"


def test_each_epoch_has_every_row_in_another_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = opened(tokenizer, data(a_file(tmp_path), eval="sort"), tmp_path)
    epochs = [prompts(found.take(start, 120)) for start in (0, 120)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == prompts_of(ROWS)
    assert epochs[0] != epochs[1] and epochs[0] != prompts_of(ROWS)
    assert len({example.id for example in found.take(0, 240)}) == 240


def prompts_of(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"] for row in rows]


def test_equal_positions_give_equal_examples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chosen = data(a_file(tmp_path))
    found = opened(tokenizer, chosen, tmp_path)
    whole = found.take(0, 300)
    again = opened(tokenizer, chosen, tmp_path)
    for start in (250, 3, 120, 119, 0, 290):
        assert again.take(start, 10) == found.take(start, 10) == whole[start : start + 10]
    assert prompts(opened(tokenizer, chosen, tmp_path, seed=1).take(0, 50)) != prompts(whole[:50])


def test_unshuffled_rows_keep_their_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = opened(tokenizer, data(a_file(tmp_path), eval="sort", shuffle=False), tmp_path)
    assert prompts(found.take(0, 121)) == [*prompts_of(ROWS), ROWS[0]["prompt"]]


@pytest.mark.system
def test_a_bookmark_leads_to_the_same_rows(there: Hub, tokenizer: Tokenizer) -> None:
    found = opened(tokenizer, data())
    whole = found.take(0, 200)
    assert found.stream is not None
    for position in (0, 70, 130):
        kept = msgspec.json.encode(found.stream.bookmark(position))
        resumed = opened(tokenizer, data())
        assert resumed.stream is not None
        resumed.stream.restore(msgspec.json.decode(kept, type=Bookmark))
        assert resumed.take(position, 200 - position) == whole[position:]
        assert resumed.take(0, 5) == whole[:5]


def test_hub_rows_are_those_of_a_file(there: Hub, tokenizer: Tokenizer, tmp_path: Path) -> None:
    of_hub, of_file = opened(tokenizer, data()), opened(tokenizer, data(a_file(tmp_path)), tmp_path)
    assert prompts(of_hub.take(0, 150)) == prompts(of_file.take(0, 150))


def test_a_resume_reads_the_same_commit(there: Hub, tokenizer: Tokenizer) -> None:
    given = {"train": NAME, "eval": f"{NAME}:test", "streaming": True, "buffer": 16}
    spec = pinned(convert({"data": given}), {}, newest_commit)
    whole, held_out = opened(tokenizer, spec.data), load_eval(spec.data, tokenizer, 5, Path())
    there.push(files([row | {"prompt": f"{row['prompt']}!"} for row in ROWS]))
    resumed = pinned(convert({"data": given}), commits(spec), newest_commit)
    again = opened(tokenizer, resumed.data)
    assert again.take(0, 150) == whole.take(0, 150) and again.digest == whole.digest
    assert load_eval(resumed.data, tokenizer, 5, Path()) == held_out
    assert opened(tokenizer, data()).take(0, 1)[0].prompt.endswith("!")
    assert whole.take(0, 1)[0].id.startswith("rows/") and held_out[0].id.startswith("rows:test/")


def test_held_out_rows_are_never_trained_on(there: Hub, tokenizer: Tokenizer) -> None:
    trained = set(prompts(opened(tokenizer, data()).take(0, 120)))
    held_out = load_eval(data(), tokenizer, 100, Path())
    assert 0 < len(held_out) < 20 and held_out == load_eval(data(), tokenizer, 100, Path())
    assert trained | set(prompts(held_out)) == {*prompts_of(ROWS)} and not trained & set(prompts(held_out))
    assert len(load_eval(data(), tokenizer, 2, Path())) == 2
    assert prompts(load_eval(data(eval=NAME), tokenizer, 4, Path())) == ["S:9="] * 4


def test_completions_are_streamed_too(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    given = {"train": "rows.jsonl", "streaming": True, "buffer": 16}
    spec = convert({"algorithm": "sft", "data": given})
    found, held_out = load_train(spec, tokenizer, tmp_path), load_held_out(spec, tokenizer, tmp_path)
    examples = found.take(0, 112)
    assert all(example.targets for example in [*examples, *held_out])
    assert held_out and not {*prompts(examples)} & {*prompts(held_out)}
    again = load_train(spec, tokenizer, tmp_path).take(40, 9)
    assert [example.id for example in again] == [example.id for example in examples[40:49]]


def test_a_moment_without_the_hub_changes_nothing(
    there: Hub, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = opened(tokenizer, data()).take(0, 200)
    found = opened(tokenizer, data())
    there.failing = 8
    assert found.take(0, 200) == whole
    assert f"{NAME}: " in (said := capsys.readouterr().out) and "again in 0 s" in said


def test_a_hub_that_is_gone_is_reported(there: Hub, tokenizer: Tokenizer) -> None:
    found = opened(tokenizer, data())
    there.failing = 10**6
    with pytest.raises(SpecError, match=f"{NAME} could not be read in 4 attempts, after row ") as refused:
        found.take(0, 200)
    assert "resuming continues" in refused.value.hint


def test_an_unknown_dataset_is_refused(there: Hub, tokenizer: Tokenizer) -> None:
    before = there.answers
    with pytest.raises(SpecError, match="the hub does not show the dataset nobody/nothing") as refused:
        opened(tokenizer, data("nobody/nothing"))
    assert "Check name and network" in refused.value.hint and there.answers - before < 4


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"data": {"train": "sort", "streaming": True}}, "data.streaming: data.train is not one hub dataset"),
        ({"data": {"train": ["a.jsonl", "b.jsonl"], "streaming": True}}, "not one hub dataset or one file"),
        ({"data": {"train": "a.jsonl", "streaming": True}, "algorithm": "dpo"}, "log-probabilities of all"),
        ({"data": {"train": "a.jsonl", "buffer": 5}}, "data.buffer: nothing is streamed"),
    ],
)
def test_what_cannot_be_streamed_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(SpecError, match=what):
        refuse_contradictions(convert(given))
