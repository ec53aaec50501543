"""Mistakes that a GPU would punish, planted one at a time: the checks beside this file notice each."""

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.fake_gpu.test_decoding import test_a_step_is_captured_and_read_once as decode_step
from tests.fake_gpu.test_training import LOSSES
from tests.fake_gpu.test_training import test_a_pass_keeps_what_is_foreseen as memory_of_a_pass
from tests.fake_gpu.test_training import test_a_pass_reads_once_a_micro_batch as training_pass
from tests.fake_gpu.test_training import test_lengths_that_differ_need_no_plans as plans_of_passes
from tests.fake_gpu.test_training import test_next_layout_is_made_while_the_gpu_works as layouts_of_passes
from tests.fake_gpu.test_training import (
    test_steps_snapshots_and_checkpoints_mix_no_devices as steps_of_training,
)


class _Mistake(NamedTuple):
    """One line of a function that becomes another.

    function: the module and the name in it.
    noticed: the check that must fail.
    words: how its failure says what is wrong.
    """

    function: str
    line: str
    planted: str
    noticed: Callable[[Path], None]
    words: str


def _decode(folder: Path) -> None:
    decode_step(100, 1)


def _decode_shared(folder: Path) -> None:
    decode_step(300, 1)


def _train(folder: Path) -> None:
    training_pass(next(iter(LOSSES)))


def _step(folder: Path) -> None:
    steps_of_training(None, folder)


def _plans(folder: Path) -> None:
    plans_of_passes()


def _layouts(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        layouts_of_passes(1, patch)


_TWO_DEVICES = "two devices"
_MISTAKES = {
    "ids of a prefill stay on the host": _Mistake(
        "lorad.engines.builtin.prefix:_forward",
        "inputs, lengths, begins = upload([ids, sizes, np.array(starts)], base.device)",
        "inputs, lengths, begins = map(torch.from_numpy, [ids, sizes, np.array(starts)])",
        _decode,
        _TWO_DEVICES,
    ),
    "positions are counted on the host": _Mistake(
        "lorad.models.kv:DecodeAttention.__init__",
        "torch.arange(span, device=device)",
        "torch.arange(span)",
        _decode,
        _TWO_DEVICES,
    ),
    "a step reads a number": _Mistake(
        "lorad.engines.builtin.steps:_step",
        "rows.lengths[active] += 1",
        "rows.lengths[active] += int(rows.counts[0].item() >= 0)",
        _decode,
        "while a graph is captured",
    ),
    "a step makes a tensor of a list": _Mistake(
        "lorad.engines.builtin.steps:_step",
        "rows.counts[active] += 1",
        "rows.counts[active] += torch.tensor([1], device=rows.counts.device)",
        _decode,
        "while a graph is captured",
    ),
    "sampling indexes by truth values": _Mistake(
        "lorad.engines.builtin.sampler:sample",
        "probabilities = torch.softmax(scores, -1)",
        "probabilities = torch.softmax(scores, -1); probabilities[temperature == 0].sum()",
        _decode,
        "boolean index",
    ),
    "each row is read by itself": _Mistake(
        "lorad.models.ops:download",
        "return pinned.tolist()",
        "return [[number.item() for number in row] for row in tensor]",
        _decode,
        "<= (",
    ),
    "shared prompts are joined by more kernels": _Mistake(
        "lorad.engines.builtin.steps:_step",
        "rows.lengths[active] += 1",
        "rows.lengths[active] += 1\n    for _ in range(60): rows.counts[active] += 0",
        _decode_shared,
        "<= (49 +",
    ),
    "attention of unlike heads is in float32": _Mistake(
        "lorad.models.attention:causal",
        "q.transpose(1, 2),\n        k.transpose(1, 2),\n        v.transpose(1, 2),\n        is_causal",
        "q.transpose(1, 2).float(),\n        k.transpose(1, 2).float(),\n"
        "        v.transpose(1, 2).float(),\n        is_causal",
        _decode,
        "math",
    ),
    "a snapshot stays on the device": _Mistake(
        "lorad.trainers.builtin.slot:Slot.snapshot",
        '.to("cpu", copy=True)',
        ".clone()",
        _step,
        "can't convert cuda",
    ),
    "a layout of blocks stays on the host": _Mistake(
        "lorad.trainers.builtin.blocks:Layout.move",
        "upload([*self._whole, *self._written.values()], self._base.device)",
        "[torch.from_numpy(array) for array in [*self._whole, *self._written.values()]]",
        _train,
        _TWO_DEVICES,
    ),
    "a layout is made when a pass has been read": _Mistake(
        "lorad.trainers.builtin.passes:forward_backward",
        "    meanwhile()\n",
        "",
        _layouts,
        "(1, True) != (0, True)",
    ),
    "the norm of activations keeps them in float64": _Mistake(
        "lorad.models.ops:_RmsNorm.forward",
        "ctx.save_for_backward(x, weight, r)",
        "ctx.save_for_backward(x, weight, r); ctx.more = x.double(), normed.double()",
        memory_of_a_pass,
        "<= (",
    ),
}


@pytest.mark.system(but=["a step reads a number", "a layout of blocks stays on the host"])
@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_planted_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted = _MISTAKES[mistake]
    module = importlib.import_module(planted.function.partition(":")[0])
    function, code = _with_mistake(module, planted)
    monkeypatch.setattr(function, "__code__", code)
    with pytest.raises(Exception) as caught:
        planted.noticed(tmp_path)
    assert planted.words in str(caught.value)


@pytest.mark.system
def test_attention_of_cudnn_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    with pytest.raises(AssertionError, match="cudnn"):
        _plans(tmp_path)


def _with_mistake(module: types.ModuleType, mistake: _Mistake) -> tuple[types.FunctionType, types.CodeType]:
    """Return the function as it is, and the code that it would have with the mistake in it."""
    source = inspect.getsource(module)
    name = mistake.function.partition(":")[2]
    lines, first = inspect.getsourcelines(_function(module, name))
    own = "".join(lines)
    assert own.count(mistake.line) == 1, f"{mistake.line!r} is not once in {mistake.function}"
    before = "".join(source.splitlines(keepends=True)[: first - 1])
    changed = before + own.replace(mistake.line, mistake.planted) + source[len(before) + len(own) :]
    copy = types.ModuleType(module.__name__)
    copy.__file__ = module.__file__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, copy)
        exec(compile(changed, str(module.__file__), "exec"), copy.__dict__)
    return _function(module, name), _function(copy, name).__code__


def _function(module: types.ModuleType, name: str) -> types.FunctionType:
    """Return a function of a module, or a method, as it was written."""
    value: object = module
    for part in name.split("."):
        value = vars(value)[part]
    value = inspect.unwrap(getattr(value, "__func__", value))  # type: ignore[arg-type]
    assert isinstance(value, types.FunctionType)
    return value
