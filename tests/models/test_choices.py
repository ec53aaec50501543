"""The form of a product that a machine has measured stays, for all processes after it."""

import json
import os
import stat
from pathlib import Path
from typing import get_args

import pytest
import torch

from lorad.models.products import choices
from lorad.models.products import forms as products
from lorad.models.products.choices import Choices, machine_of, quickest, seconds_of
from lorad.models.products.forms import Form, Shape, by_rule, choose_by, linear

SHAPE = Shape(8, 512, 600, False)
ALL: tuple[Form, ...] = get_args(Form)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Measurements, which say that another form than the rule's is quickest."""
    shapes = list[Shape]()

    def seconds(shape: Shape, base_bytes: int) -> dict[Form, float]:
        shapes.append(shape)
        return {form: 2.0 - (form == "weight_first") for form in ALL}

    monkeypatch.setattr(choices, "seconds_of", seconds)
    return shapes


def file_in(directory: Path) -> Path:
    (file,) = directory.glob("*.json")
    return file


def test_a_shape_is_measured_once_for_all(measured: list[Shape], tmp_path: Path) -> None:
    first, second = Choices(tmp_path, 1 << 20), Choices(tmp_path, 1 << 20)
    assert [first(SHAPE), first(SHAPE), second(SHAPE), Choices(tmp_path, 1)(SHAPE)] == ["weight_first"] * 4
    assert measured == [SHAPE]
    assert first.identity == second.identity == Choices(tmp_path, 1).identity


def test_numbers_of_rows_are_chosen_for_in_classes(measured: list[Shape], tmp_path: Path) -> None:
    chosen = Choices(tmp_path, 1)
    for rows in (*range(1, 40), 4000, 9000):
        chosen(SHAPE._replace(rows=rows))
    assert [shape.rows for shape in measured] == [1, 2, 3, 4, 8, 16, 32, 64, 1024]


def test_a_form_is_read_from_its_file(measured: list[Shape], tmp_path: Path) -> None:
    Choices(tmp_path, 1)(SHAPE._replace(is_turned=True))
    kept = json.loads(file_in(tmp_path).read_text())
    assert kept["forms"] == {"8x512x600t": "weight_first"}
    assert kept["machine"]["torch"] == torch.__version__ and "flags" not in kept["machine"]
    file_in(tmp_path).write_text(json.dumps(kept | {"forms": {"8x512x600": "weight_first_even"}}))
    assert Choices(tmp_path, 1)(SHAPE) == "weight_first_even" and len(measured) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"identity": 3}', b'{"forms": {"a": "quick"}}'])
def test_a_broken_file_begins_anew(measured: list[Shape], tmp_path: Path, content: bytes) -> None:
    before = Choices(tmp_path, 1)
    file_in(tmp_path).write_bytes(content)
    after = Choices(tmp_path, 1)
    assert after.identity != before.identity
    assert before(SHAPE) == by_rule(SHAPE) and after(SHAPE) == "weight_first"


def test_what_cannot_be_kept_goes_by_rule(measured: list[Shape], tmp_path: Path) -> None:
    chosen = Choices(tmp_path, 1)
    file_in(tmp_path).unlink()
    assert chosen(SHAPE) == by_rule(SHAPE) and not measured
    with pytest.raises(OSError):
        Choices(file_in_the_way(tmp_path), 1)


def file_in_the_way(directory: Path) -> Path:
    (directory / "products").write_text("")
    return directory / "products"


def test_only_their_owner_reads_and_writes(measured: list[Shape], tmp_path: Path) -> None:
    directory = tmp_path / "new" / "products"
    Choices(directory, 1)(SHAPE)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())]
    assert modes == [0o700, 0o600, 0o600]


def test_other_threads_and_switches_are_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine_of(1)
    assert here != machine_of(2)
    monkeypatch.setitem(os.environ, "ONEDNN_MAX_CPU_ISA", "SSE41")
    assert here != machine_of(1)


def test_the_rule_counts_where_little_is_won() -> None:
    seconds: dict[Form, float] = {"torch": 1.0, "weight_first": 0.95, "onednn": 3.0}
    assert quickest(seconds, "torch") == "torch"
    assert quickest(seconds, "onednn") == "weight_first"


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("rows", [1, 6])
def test_every_form_is_measured(rows: int, is_turned: bool) -> None:
    forms = {form for form in ALL if form != "onednn" or products.has_onednn()}
    if rows > 1:
        forms.remove("vector")
    seconds = seconds_of(Shape(rows, 512, 600, is_turned), 8 << 20)
    assert set(seconds) == forms and all(value > 0 for value in seconds.values())


def test_what_is_measured_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    full = torch.full

    def counted(size: tuple[int, ...], value: float) -> torch.Tensor:
        tensor = full(size, value)
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "full", counted)
    for module in (choices, products):
        monkeypatch.setattr(module, "FORMS", {"torch": lambda x, weight, bias: None})
    seconds_of(Shape(1024, 128_256, 4096, False), 32 << 30)
    assert max(sizes) <= 1 << 24


def test_products_have_the_chosen_form(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Shape]()

    def chooser(shape: Shape) -> Form:
        asked.append(shape)
        return "weight_first"

    monkeypatch.setattr(products, "_chooser", by_rule)
    choose_by(chooser)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(6, 512, generator=random, requires_grad=True)
    weight = torch.randn(600, 512, generator=random)
    y = linear(x, weight)
    y.backward(torch.ones_like(y))
    assert asked[-2:] == [Shape(6, 600, 512, False), Shape(6, 512, 600, True)]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(6, -1), atol=1e-3, rtol=1e-4)


def test_a_user_without_a_home_has_the_rule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LORAD_CACHE", str(file_in_the_way(tmp_path)))
    monkeypatch.setattr(products, "_chooser", by_rule)
    with caplog.at_level("INFO"):
        assert choices.measure_products(1 << 20) == ""
    assert products._chooser is by_rule and "nothing can be kept in" in caplog.text
    monkeypatch.setenv("LORAD_CACHE", str(tmp_path / "cache"))
    assert choices.measure_products(1 << 20) and products._chooser is not by_rule
