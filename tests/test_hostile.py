"""Files and texts made to hurt: each is refused with a message, soon, and without blocking."""

import asyncio
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorad.adapters import tensors
from lorad.adapters.peft import CONFIG, WEIGHTS, read_peft
from lorad.adapters.tensors import read_tensors
from lorad.bounds import METRIC_NAME, METRICS, RECORD_BYTES, YAML_NODES
from lorad.box.config import load as load_config
from lorad.daemon.api.verbs.logs import read as read_log
from lorad.errors import AdapterRefused, IntegrityError, LoradError, SpecError
from lorad.models.directory import INDEX, read_config, weight_files
from lorad.models.facts import read_facts
from lorad.protocol.journal import JournalWriter, StepFact, read
from lorad.spec.text import load_spec
from lorad.store import events
from lorad.store.db import Store
from lorad.store.ingest import ingest
from tests.daemon.test_daemon import raw
from tests.kit.daemon_world import serving
from tests.kit.fakes.fake_wire import write_adapter
from tests.kit.journals import new_run

DEEP = 100_000
LAUGHS = f"a: &a [{'x,' * 50}]\n" + "".join(
    f"{key}: &{key} [{', '.join(['*' + before] * 4)}]\n" for before, key in zip("abcd", "bcde", strict=True)
)
BOMBS = {
    "aliases of aliases": LAUGHS,
    "an alias of much": f"a: &a [{'x,' * 9_000}]\nb: *a\nc: *a\n",
    "an alias of itself": "a: &a [*a]",
    "very many values": f"a: [{'x,' * 100_000}]",
    "very many keys": "".join(f"k{number}: v\n" for number in range(YAML_NODES)),
    "depth": "[" * DEEP,
    "depth of mappings": "{a: " * DEEP,
    "a number of many digits": "seed: " + "9" * DEEP,
    "a hexadecimal number of many digits": "seed: 0x" + "f" * DEEP,
    "a python tag": "!!python/object/apply:os.system ['id']",
    "a python name": "name: !!python/name:os.system",
    "a merge": "base: &b {a: 1}\n<<: *b",
    "a doubled key": "seed: 1\nseed: 2",
    "a key that is a list": "? [a]\n: b",
    "NUL": "name: a\0b",
    "half a surrogate": "name: \ud800",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
def test_a_yaml_bomb_is_refused_before_it_bursts(text: str) -> None:
    began = time.process_time()
    with pytest.raises(SpecError) as error:
        load_spec(text, source="a.yaml")
    assert time.process_time() - began < 2.0
    assert error.value.message.startswith("a.yaml")
    assert error.value.hint
    assert "unknown key" not in error.value.message
    assert len(error.value.message) < 500


@pytest.mark.parametrize(
    "name", ["aliases of aliases", "depth", "a doubled key", "a python tag", "very many keys"]
)
def test_a_configuration_is_read_as_carefully(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text(BOMBS[name])
    with pytest.raises(SpecError, match=r"config\.yaml"):
        load_config(tmp_path / "config.yaml")


def test_pipe_as_configuration_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(SpecError, match="a pipe, not a file"):
        load_config(tmp_path / "config.yaml")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    write_adapter(directory, 1)
    read_peft(directory)
    return directory


def instead(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pipe": (os.mkfifo, "a pipe, not a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "leads out of the directory"),
    "a directory": (lambda path: path.mkdir(), "not a file|not readable"),
    "a link elsewhere": (lambda path: path.symlink_to("/etc/passwd"), "leads out of the directory"),
    "a link upwards": (lambda path: path.symlink_to("../../secret"), "leads out of the directory"),
    "nothing": (lambda path: None, "not readable: No such file"),
}


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize(("make", "words"), OTHERS.values(), ids=OTHERS.keys())
def test_adapter_files_must_be_regular_files(
    adapter: Path, name: str, make: Callable[[Path], Any], words: str
) -> None:
    instead(adapter / name, make)
    with pytest.raises(AdapterRefused, match=words) as error:
        read_peft(adapter)
    assert str(adapter / name) in str(error.value)
    assert error.value.hint


def test_hub_snapshot_is_read_through_its_links(adapter: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "repo" / "snapshots" / "abc", tmp_path / "repo" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in (CONFIG, WEIGHTS):
        (adapter / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert read_peft(snapshot).config.rank == 1


@pytest.mark.parametrize(
    "name", ["adapter_model.bin", "adapter_model.pt", "weights.pkl", ".metadata", "model.ckpt"]
)
def test_a_pickle_is_refused_by_its_name(adapter: Path, name: str) -> None:
    (adapter / WEIGHTS).rename(adapter / name)
    with pytest.raises(AdapterRefused, match=f"{name}: pickled weights are never read"):
        read_peft(adapter)


def test_a_huge_configuration_is_not_read(adapter: Path) -> None:
    os.truncate(adapter / CONFIG, 1 << 30)
    with pytest.raises(AdapterRefused, match="larger than"):
        read_peft(adapter)


def test_a_sparse_file_of_weights_is_refused(adapter: Path) -> None:
    os.truncate(adapter / WEIGHTS, 1 << 30)
    with pytest.raises(AdapterRefused, match="sparse: nothing was written at byte"):
        read_peft(adapter)


def test_oversized_adapter_is_refused_unread(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "ADAPTER_BYTES", 100)
    with pytest.raises(AdapterRefused, match="are more than 100"):
        read_peft(adapter)


def entry(start: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS: dict[str, tuple[bytes, int]] = {  # the header, and how much data follows
    "of no length": (struct.pack("<Q", 0), 0),
    "cut off": (b"\x00\x01", 0),
    "no JSON": (b"[]", 0),
    "a pickle": (b"\x80\x04}", 0),
    "deep": (b'{"a":' * DEEP, 0),
    "a name twice": (b'{"a": 1, "a": 2}', 0),
    "larger than it is": (json.dumps({"a": entry(0, 4, [2])}).encode(), 4),
    "beyond the end": (json.dumps({"a": entry(0, 400, [100])}).encode(), 4),
    "overlapping": (json.dumps({"a": entry(0, 4, [1]), "b": entry(2, 6, [1])}).encode(), 6),
    "with a hole": (json.dumps({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}).encode(), 12),
    "backwards": (json.dumps({"a": entry(4, 0, [1])}).encode(), 4),
    "with more behind": (json.dumps({"a": entry(0, 4, [1])}).encode(), 8),
    "of negative size": (json.dumps({"a": entry(0, 4, [-1, -1])}).encode(), 4),
    "of sizes that multiply without end": (json.dumps({"a": entry(0, 4, [10**4000] * 500)}).encode(), 4),
    "of too many dimensions": (json.dumps({"a": entry(0, 4, [1] * 9)}).encode(), 4),
    "of an unknown type": (json.dumps({"a": entry(0, 4, [1], "PICKLE")}).encode(), 4),
    "of no shape": (b'{"a": {"dtype": "F32"}}', 0),
    "of something else": (b'{"a": 5}', 0),
}


@pytest.mark.parametrize(("header", "size"), HEADERS.values(), ids=HEADERS.keys())
def test_a_lying_header_is_refused(tmp_path: Path, header: bytes, size: int) -> None:
    is_raw = header[:1] not in (b"{", b"[", b"\x80")
    path = tmp_path / WEIGHTS
    path.write_bytes((header if is_raw else struct.pack("<Q", len(header)) + header) + b"\0" * size)
    with pytest.raises(AdapterRefused) as error:
        read_tensors(path)
    assert str(path) in str(error.value)
    assert error.value.hint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 5, None, ["a"]]
)
def test_an_index_that_points_elsewhere_is_refused(model: Path, name: Any) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(SpecError, match="no file beside it"):
        weight_files(model)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()]
)
def test_model_configuration_must_be_a_regular_file(model: Path, make: Callable[[Path], Any]) -> None:
    instead(model / "config.json", make)
    with pytest.raises(SpecError, match="not a file"):
        read_config(model)


def test_model_of_pickles_is_refused_by_name(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(SpecError, match=r"pytorch_model\.bin, which is never read"):
        weight_files(model)


def test_sparse_weights_of_a_model_are_refused(model: Path) -> None:
    (model / "config.json").write_text('{"vocab_size": 5, "max_position_embeddings": 5}')
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    os.truncate(path, 1 << 32)
    with pytest.raises(SpecError, match="sparse"):
        read_facts(model)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    opened = Store(tmp_path / "lorad.db")
    new_run(opened)
    yield opened
    opened.close()


def step(journal: Path, number: int, metrics: dict[str, Any], **more: Any) -> None:
    with JournalWriter(journal, "sorter", 1) as writer:
        fact = {
            "version": 1,
            "samples": "samples/1.jsonl",
            "samples_sha256": "",
            "metrics": metrics,
            "prompts": [],
        }
        writer.append("step", number, fact | more)


def test_excess_metrics_are_dropped_with_one_warning(store: Store, tmp_path: Path) -> None:
    path, many = tmp_path / "journal.jsonl", {f"m{number:04d}": 1.0 for number in range(METRICS + 50)}
    strange = {"a" * (METRIC_NAME + 1): 1.0, "a list": [1], "text": "x", "large": 10**30, "none": None}
    for number in (1, 2):
        step(path, number, many | strange | {"reward": 0.5})
    ingest(store, "sorter", path)
    kept = json.loads(store.rows("SELECT metrics FROM steps")[0]["metrics"])
    assert list(kept) == sorted([*many, "reward", "none"])[:METRICS]
    told = [event.data["message"] for event in events.after(store, 0) if event.kind == "warning"]
    assert len(told) == 1
    assert str(METRICS) in told[0]


def test_oversized_record_is_refused_with_its_place(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    step(path, 1, {})
    with pytest.raises(IntegrityError, match="the record of step at step 2 is longer than"):
        step(path, 2, {}, prompts=["x" * RECORD_BYTES])
    with path.open("ab") as file:
        file.write(b"x" * (RECORD_BYTES + 10))
    with pytest.raises(IntegrityError, match=r"the record at byte \d+ is longer than"):
        list(read(path))
    with pytest.raises(IntegrityError):
        ingest(store, "sorter", path)


def test_events_are_bounded(store: Store, tmp_path: Path) -> None:
    step(tmp_path / "journal.jsonl", 1, {"reward": 1.0}, junk=["x" * 10_000] * 100)
    ingest(store, "sorter", tmp_path / "journal.jsonl")
    (told,) = [event.data for event in events.after(store, 0) if event.kind == "step"]
    assert told["metrics"] == {"reward": 1.0}
    assert "junk" not in told


def test_a_journal_that_is_a_pipe_blocks_nobody(store: Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises((OSError, LoradError)):
        list(read(tmp_path / "journal.jsonl"))


def test_endless_log_line_is_cut_when_shown(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 500_000 + "\nend\n")
    text = read_log(tmp_path / "log", 0, 1 << 20).text
    assert len(text) < 20_000
    assert text.endswith("more)\nend\n")


def test_a_log_that_leads_elsewhere_is_empty(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/etc/passwd")
    assert read_log(tmp_path / "log", 0, 1 << 20).text == ""


def test_the_step_fact_has_what_this_file_writes() -> None:
    assert {"version", "prompts", "samples", "samples_sha256", "metrics"} <= set(StepFact.__struct_fields__)


@pytest.mark.parametrize(
    "name", ["a%2Fb", "..%2F..%2Fetc", "%00", "a%00b", "a" * 4000, "%F0%9F%98%80", "a%0Ab", "%FF%FE", "%ZZ"]
)
async def test_hostile_run_name_is_just_not_found(home: Path, name: str) -> None:
    async with serving(home) as api:
        for method, path in (
            ("GET", f"/v1/runs/{name}"),
            ("DELETE", f"/v1/aliases/{name}"),
            ("DELETE", f"/v1/runs/{name}"),
        ):
            status, body = await asyncio.to_thread(raw, api.client, method, path, None)
            assert (status, json.loads(body)["error"]["kind"]) in ((404, "NotFound"), (422, "SpecError"))


@pytest.mark.parametrize(
    "body", [{"spec": "\0"}, {"spec": "", "source": "", "cwd": "/a\0b"}, {"x": [{"y\0": 1}]}]
)
async def test_request_with_a_nul_is_refused(home: Path, body: dict[str, Any]) -> None:
    async with serving(home) as api:
        status, answer = await asyncio.to_thread(
            raw, api.client, "POST", "/v1/runs", json.dumps(body).encode()
        )
        assert status == 422 and "NUL" in json.loads(answer)["error"]["message"]
