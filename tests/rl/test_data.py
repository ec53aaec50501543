"""Tokenizers and data: where prompts come from, in which order, and what is wrong with them."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.rl.data import Dataset, load_data, load_eval
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data

TINY = resolve("builtin:tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def numbered(tmp_path: Path, count: int) -> str:
    rows = [{"prompt": f"S:{i}=", "answer": str(i), "level": i} for i in range(count)]
    return write_lines(tmp_path / "train.jsonl", *rows).name


def load(tokenizer: Tokenizer, source: str, cwd: Path, seed: int = 0, **settings: Any) -> Dataset:
    return load_data(source, "train", Data(**settings), tokenizer, seed, cwd)


def refusal(tokenizer: Tokenizer, source: str, cwd: Path, **settings: Any) -> SpecError:
    with pytest.raises(SpecError) as refused:
        load(tokenizer, source, cwd, **settings)
    assert refused.value.hint
    return refused.value


def a_tokenizer(directory: Path, **files: Any) -> Tokenizer:
    shutil.copy(TINY / "tokenizer.json", directory)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.{'jinja' if name == 'chat_template' else 'json'}").write_text(text)
    return Tokenizer(directory)


def test_text_goes_to_ids_and_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("S:4821=")
    assert len(ids) == 7
    assert tokenizer.decode([*ids, *tokenizer.eos_ids]) == "S:4821="
    assert tokenizer.decode([*ids, *tokenizer.eos_ids], skip_special=False) == "S:4821=<eos>"
    assert tokenizer.encode_batch(["S:", "4"]) == [tokenizer.encode("S:"), tokenizer.encode("4")]
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((1,), 0)


def test_end_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    configs = {
        "generation_config": {"eos_token_id": [5, 6]},
        "config": {"eos_token_id": 7, "pad_token_id": 8},
    }
    found = a_tokenizer(tmp_path, **configs)
    assert (found.eos_ids, found.pad_id) == ((5, 6), 8)


def test_ends_may_be_named_by_their_text_only(tmp_path: Path) -> None:
    found = a_tokenizer(tmp_path, tokenizer_config={"eos_token": {"content": "<eos>"}})
    assert (found.eos_ids, found.pad_id) == ((1,), 1)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"missing tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SpecError, match="not readable"):
        Tokenizer(tmp_path)


def test_tokenizer_with_an_endless_pattern_is_refused(tmp_path: Path) -> None:
    settings = json.loads((TINY / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings | {"pre_tokenizer": split}))
    with pytest.raises(SpecError, match=r"tokenizer\.json cannot read the text: .*retry-limit"):
        Tokenizer(tmp_path).encode("a" * 40)


CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt "
    "%}[a]{% endif %}"
)


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template": CHAT},
        {"tokenizer_config": {"chat_template": CHAT}},
        {"tokenizer_config": {"chat_template": [{"name": "default", "template": CHAT}]}},
    ],
)
def test_chat_template_is_found_wherever_kept(files: dict[str, Any], tmp_path: Path) -> None:
    found = a_tokenizer(tmp_path, **files)
    assert found.has_chat_template
    assert found.chat([{"role": "user", "content": "hi"}]) == "[user]hi[a]"


def test_a_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the model has none"):
        a_tokenizer(tmp_path).chat([])


def test_builtin_task_is_endless_and_reproducible(tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = load(tokenizer, "sort", tmp_path, seed=3)
    assert task.size is None
    assert task.take(0, 10)[4:] == task.take(4, 6)
    assert len({example.id for example in task.take(10**9, 50)}) == 50
    first = task.take(0, 1)[0]
    assert tokenizer.decode(first.tokens) == first.prompt
    assert first.row == {"prompt": first.prompt, "answer": first.answer}


def test_any_cut_of_positions_gives_the_same_examples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = numbered(tmp_path, 7)
    whole = load(tokenizer, source, tmp_path).take(0, 30)
    again = load(tokenizer, source, tmp_path)
    pieces = [example for position in (20, 0, 10) for example in again.take(position, 10)]
    assert pieces == whole[20:] + whole[:20]
    assert len({example.id for example in whole}) == 30


def test_each_epoch_shuffles_all_rows_anew(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = numbered(tmp_path, 20)
    epochs = [
        [e.row["level"] for e in load(tokenizer, source, tmp_path).take(start, 20)] for start in (0, 20)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
    assert epochs[0] != epochs[1]
    assert [e.row["level"] for e in load(tokenizer, source, tmp_path, seed=1).take(0, 20)] != epochs[0]
    kept = load(tokenizer, source, tmp_path, shuffle=False).take(18, 4)
    assert [e.row["level"] for e in kept] == [18, 19, 0, 1]


def test_order_of_an_epoch_never_changes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = load(tokenizer, numbered(tmp_path, 8), tmp_path, seed=5)
    assert [e.row["level"] for e in found.take(0, 8)] == [3, 4, 0, 2, 1, 6, 5, 7]


def test_too_long_prompts_are_dropped_and_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "a.jsonl", {"prompt": "S:123456=", "answer": ""}, {"prompt": "S:1=", "answer": ""}
    )
    found = load(tokenizer, source.name, tmp_path, max_prompt_tokens=4)
    assert (found.size, found.dropped) == (1, 1)
    assert "1 were longer than" in str(
        refusal(tokenizer, write_lines(source, {"prompt": "S:1234="}).name, tmp_path, max_prompt_tokens=3)
    )


def test_too_long_prompts_can_keep_their_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", {"prompt": "S:123456=", "answer": ""})
    found = load(tokenizer, source.name, tmp_path, max_prompt_tokens=4, too_long="truncate")
    assert (found.dropped, found.take(0, 1)[0].prompt, len(found.take(0, 1)[0].tokens)) == (0, "456=", 4)


def test_chat_template_is_used_unless_never(tmp_path: Path) -> None:
    chat = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}="
    found = a_tokenizer(tmp_path, chat_template=chat)
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    source = write_lines(
        tmp_path / "a.jsonl", {"prompt": messages, "answer": "x"}, {"prompt": "3", "answer": "x"}
    ).name
    assert [e.prompt for e in load(found, source, tmp_path, shuffle=False).take(0, 2)] == ["s:1u:2=", "u:3="]
    assert "a.jsonl:1: the prompt is a list" in str(refusal(found, source, tmp_path, chat_template="never"))
    assert load(found, "sort", tmp_path).take(0, 1)[0].prompt.startswith("S:")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", '\ufeffprompt,answer,level\n"S:2,1=",12,3\nS:1=,1,\n'),
        ("a.json", '[{"prompt": "S:2,1=", "answer": 12, "level": "3"}, {"prompt": "S:1=", "answer": "1"}]'),
    ],
)
def test_rows_come_from_other_files(tokenizer: Tokenizer, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    first, second = load(tokenizer, name, tmp_path, shuffle=False).take(0, 2)
    assert (first.prompt, first.answer, first.row["level"]) == ("S:2,1=", "12", "3")
    assert (second.prompt, second.answer, "level" in second.row) == ("S:1=", "1", False)


def test_csv_fields_are_as_long_as_rows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = "1," * 100_000
    (tmp_path / "a.csv").write_text(f'prompt,answer\nS:1=,"{long}"\n')
    (found,) = load(tokenizer, "a.csv", tmp_path).take(0, 1)
    assert found.answer == long


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("a.jsonl.gz", "", "unpack it"),
        ("a.ndjson", "{}", "rename it"),
        ("a.tsv", "a\tb", r"as .jsonl, .parquet or .csv"),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}\n', "one object a line is .jsonl"),
        ("a.jsonl", '[{"prompt": "a"}]', "list of all objects is .json"),
    ],
)
def test_files_of_other_forms_get_advice(
    tokenizer: Tokenizer, tmp_path: Path, name: str, text: str, hint: str
) -> None:
    (tmp_path / name).write_text(text)
    assert hint in str(refusal(tokenizer, name, tmp_path).hint)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "prompt,answer\nS:1=,1,2\n", "a.csv:2: not as many values"),
        ("a.csv", "prompt,answer\nS:1=\n", "a.csv:2: not as many values"),
        ("a.json", '{"prompt": "S:1="}', "a.json: not a list"),
        ("a.json", '[{"prompt": "S:1=", "answer": "1"}, 7]', "a.json:2: not a JSON object"),
        ("a.json", "[", "a.json: not JSON"),
        ("a.jsonl", "", "a.jsonl has no row"),
    ],
)
def test_wrong_files_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    assert says in str(refusal(tokenizer, name, tmp_path))


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({}, {"reward_model": {"style": "rule", "ground_truth": "12"}, "data_source": "sort"}),
        ({}, {"reward_spec": {"method": "rule", "ground_truth": "12"}, "env_class": "sort"}),
        ({"answer_key": "extra_info.answer"}, {"extra_info": {"answer": "12"}}),
        ({"answer_key": "a.b"}, {"a.b": "12", "a": {"b": "13"}}),
    ],
)
def test_answers_are_found_inside_columns(
    tokenizer: Tokenizer, tmp_path: Path, settings: dict[str, Any], row: dict[str, Any]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", {"prompt": "S:21="} | row).name
    (found,) = load(tokenizer, source, tmp_path, **settings).take(0, 1)
    assert found.answer == "12" and found.row.items() >= row.items()


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "2"}]}).name
    assert "the model has no chat template" in str(refusal(a_tokenizer(tmp_path), source, tmp_path))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{oops\n", "train.jsonl:3: not JSON: Expecting property name enclosed in double quotes (char 1)"),
        ('{"prompt":\n', "train.jsonl:3: not JSON: Expecting value (char 11)"),
        ('{"prompt": "\\ud800"}\n', "train.jsonl:3: not JSON"),
        ("[1]\n", "train.jsonl:3: not a JSON object"),
        (
            {"question": 1, "answer": ""},
            "train.jsonl:3: the key 'prompt' is missing; there is question, answer",
        ),
        ({"prompt": None, "answer": ""}, "train.jsonl:3: the key 'prompt' is null"),
        ({"prompt": "S:"}, "train.jsonl:3: the key 'answer' is missing; there is prompt"),
        ({"prompt": 3, "answer": ""}, "train.jsonl:3: the prompt is neither"),
        (
            {"prompt": [{"role": "user"}], "answer": ""},
            "train.jsonl:3: message 1 of the prompt has no content",
        ),
        ({"prompt": "", "answer": ""}, "train.jsonl:3: the prompt is empty"),
        ("[" * 100_000 + "\n", "train.jsonl:3: not JSON"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(
    line: Any, says: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    good = {"prompt": "S:1=", "answer": "1"}
    source = write_lines(tmp_path / "train.jsonl", good, "\n", line, good).name
    assert says in str(refusal(tokenizer, source, tmp_path))


def test_undecodable_bytes_are_refused_with_their_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "1"}\n{"prompt": "\xff\xfe"}\n')
    assert "a.jsonl:2: not JSON" in str(refusal(tokenizer, "a.jsonl", tmp_path))


def test_answers_may_be_absent_altogether_or_be_numbers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", {"prompt": "S:1="}).name
    found = load(tokenizer, source, tmp_path)
    assert (found.has_answers, found.take(0, 1)[0].answer) == (False, "")
    source = write_lines(tmp_path / "a.jsonl", {"question": "S:1=", "n": 12}).name
    assert (
        load(tokenizer, source, tmp_path, prompt_key="question", answer_key="n").take(0, 1)[0].answer == "12"
    )


def test_parquet_is_read_or_refused_when_broken(tokenizer: Tokenizer, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": "S:1=", "answer": "1"}, {"prompt": None, "answer": "2"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), tmp_path / "a.parquet")
    assert load(tokenizer, "a.parquet", tmp_path).take(0, 2)[1].answer == "1"
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert "a.parquet:2: the key 'prompt' is null" in str(refusal(tokenizer, "a.parquet", tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "not readable as Parquet" in str(refusal(tokenizer, "a.parquet", tmp_path))


@pytest.mark.parametrize("source", ["missing.jsonl", "sorting", "data.csv", "a/b/c", "."])
def test_a_source_that_is_nothing_is_refused(source: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert source.rpartition("/")[2] in str(refusal(tokenizer, source, tmp_path))


def test_hub_dataset_without_its_package_gives_a_hint(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("hub:org/name:main:train", "org/name"):
        assert "pip install datasets" in refusal(tokenizer, source, tmp_path).hint


def test_eval_is_disjoint_from_training(tokenizer: Tokenizer, tmp_path: Path) -> None:
    held_out = load_eval(Data(train="sort"), tokenizer, 64, tmp_path)
    assert held_out[:10] == load_eval(Data(train="sort", eval="sort"), tokenizer, 10, tmp_path)
    trained = {e.prompt for e in load(tokenizer, "sort", tmp_path).take(0, 2000)}
    assert not trained & {e.prompt for e in held_out}


def test_eval_file_is_taken_in_its_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A file for training makes no eval by itself."""
    source = numbered(tmp_path, 5)
    assert [e.row["level"] for e in load_eval(Data(eval=source), tokenizer, 3, tmp_path)] == [0, 1, 2]
    assert len(load_eval(Data(eval=source), tokenizer, 99, tmp_path)) == 5
    assert load_eval(Data(train=source), tokenizer, 99, tmp_path) == []
