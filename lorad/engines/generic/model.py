"""The model of a checkpoint as transformers makes it, and adapters on its linears, one for each row."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lorad.adapters.adapter import Adapter
from lorad.adapters.targets import HEAD, leaf, renamed
from lorad.errors import AdapterRefused, SpecError
from lorad.models.hf.opening import auto_class, in_a_line, read_config, without_towers

_PROBE = 4  # tokens of the text that shows which linears a forward calls


class RowAdapter:
    """An adapter on the model's device that nothing mutates: A and B, times the scale, of each module."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, device: torch.device) -> None:
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for module in adapter.config.modules:
            a, b = (
                torch.from_numpy(np.array(adapter.tensors[f"{module}.lora_{half}.weight"])).to(device)
                for half in "AB"
            )
            self.pairs[module] = (a.to(dtype), (b * adapter.config.scale_of(module)).to(dtype))
        self.bytes = sum(half.nbytes for pair in self.pairs.values() for half in pair)


class SharedBase(Protocol):
    """A model that somebody else calls too.

    linears: what computes each linear of the base, by the names of the checkpoint.
    """

    model: Any
    dtype: torch.dtype
    device: torch.device
    linears: dict[str, nn.Module]

    def lent(self) -> AbstractContextManager[None]:
        """Hold the model for a forward, in which it computes as the checkpoint has it."""
        ...


class GenericModel:
    """A frozen model whose linears add the adapters of the rows that a forward is about.

    One forward at a time; all of it belongs to the pool's compute thread.

    module: the model of transformers.
    linears: its linears that an adapter can be on, by the names that the checkpoint has for them.
    lent: held during each forward, where somebody else calls the module too.
    vocab_size: the tokens that it has scores for.
    max_tokens: the positions that it has.
    """

    def __init__(
        self,
        module: Any,
        dtype: torch.dtype,
        device: torch.device,
        linears: Mapping[str, nn.Module],
        lent: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.module = module
        config = self.module.config.get_text_config()
        self.config = config
        self.vocab_size: int = config.vocab_size
        self.max_tokens: int = config.max_position_embeddings
        self.linears = linears
        self._lent = lent
        self._rows: list[tuple[RowAdapter, Tensor | None]] = []
        self._count = 0
        self._called: set[str] = set()
        for name, linear in self.linears.items():
            linear.register_forward_hook(partial(self._add, name))

    @classmethod
    def opened(
        cls, directory: Path, dtype: torch.dtype, device: torch.device, names: Collection[str]
    ) -> "GenericModel":
        """Load a checkpoint, without towers.

        Names without a linear behind them are left out: a class has prefixes of its own before its layers.
        Raises SpecError for what transformers does not know, for quantized weights, and without safetensors;
        and as `renamed` does.

        names: the names that the checkpoint has for its linears.
        """
        try:
            model = auto_class(read_config(directory)).from_pretrained(
                directory,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except (ValueError, OSError, KeyError) as error:
            hint = "give a model in safetensors that transformers supports without code of its own"
            raise SpecError(f"{directory}: {in_a_line(error)}", key="model.path", hint=hint) from error
        module = without_towers(model).to(device).eval().requires_grad_(False)
        inside = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
        linears = {name: inside[own] for name, own in renamed(names, inside).items() if own in inside}
        head = module.get_output_embeddings()
        if isinstance(head, nn.Linear):
            linears |= {name: head for name in names if leaf(name) == HEAD}
        return cls(module, dtype, device, linears)

    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.module.parameters())

    def bytes_per_token(self) -> int:
        """Return what the cache keeps of a token at most: as if each layer had attention to all of them."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * size * self.dtype.itemsize)

    def load(self, adapter: Adapter) -> RowAdapter:
        """Put an adapter on the device. Raises AdapterRefused where the forward skips one of its linears."""
        rows = RowAdapter(adapter, self.dtype, self.device)
        self._called.clear()
        self.forward([rows], torch.zeros(1, _PROBE, dtype=torch.int64), use_cache=False)
        if passed := sorted(rows.pairs.keys() - self._called):
            raise AdapterRefused(
                f"{type(self.module).__name__} computes {passed[0]} without calling it, so an adapter on it "
                "would change nothing",
                hint="leave it out with lora.exclude_modules, or use rollout.backend: vllm or sglang",
            )
        return rows

    @torch.no_grad()
    def forward(self, adapters: Sequence[RowAdapter | None], ids: Tensor, **more: Any) -> Tensor:
        """Return the scores [rows, tokens, vocab] of `ids` [rows, tokens], each row with its own adapter."""
        distinct = dict.fromkeys(adapters)
        self._rows = []
        for adapter in distinct:
            rows = [row for row, other in enumerate(adapters) if other is adapter]
            places = None if len(distinct) == 1 else torch.tensor(rows, device=self.device)
            if adapter is not None:
                self._rows.append((adapter, places))
        self._count = len(adapters)
        try:
            with self._lent():
                logits: Tensor = self.module(input_ids=ids.to(self.device), **more).logits
        finally:
            self._rows = []
        return logits

    def _add(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Add to each row of a linear's output what its adapter has there.

        Mixtures of experts hand over the tokens of all rows as one list, row after row.
        """
        if not self._rows:
            return None
        self._called.add(name)
        shape = output.shape
        for adapter, rows in self._rows:
            pair = adapter.pairs.get(name)
            if pair is None:
                continue
            a, b = pair
            if rows is None:
                output = output + inputs[0] @ a.T @ b.T
                continue
            x = inputs[0].reshape(self._count, -1, inputs[0].shape[-1])[rows]
            output = output.reshape(self._count, -1, shape[-1]).index_add(0, rows, x @ a.T @ b.T)
        return output.reshape(shape)
