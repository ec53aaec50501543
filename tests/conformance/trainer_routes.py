"""What trainers that replay routes keep: tokens go to the experts that the batch says, weighed by the
trainer's own router.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional as F

from lorad.protocol.batch import Batch, PolicyLoss
from lorad.protocol.calls import ForwardBackward
from lorad.routes import Routes, RouteShape, is_unknown
from lorad.trainers.base import Policy, Trainer
from tests.conformance.expert_weights import gradient_norm, merge
from tests.conformance.reference import random_batch, reference_logprobs, reference_model
from tests.conformance.trainer_kit import BASE, TrainerCase, accumulate, open_trained, spec_for, targets_for

SHAPE = RouteShape(layers=2, experts=4, per_token=2)


def random_routes(batch: Batch, seed: int = 0, unknown: float = 0.1) -> Routes:
    """Experts by lot, of a share of the tokens none."""
    rng = np.random.default_rng(seed)

    def some(tokens: int) -> np.ndarray:
        drawn = rng.random((tokens, SHAPE.layers, SHAPE.experts)).argsort(-1)[..., : SHAPE.per_token]
        hidden = rng.random(tokens) < unknown
        return np.where(hidden[:, None, None], SHAPE.unknown(tokens), drawn.astype(SHAPE.dtype))

    return Routes(some(batch.prompts.size), some(batch.completions.size))


def _routers(model: Any) -> list[Any]:
    names = ("mlp.gate", "mlp.router")
    return [module for name, module in model.named_modules() if name.endswith(names)]


@contextlib.contextmanager
def routed(model: Any, routes: list[np.ndarray]) -> Iterator[list[torch.Tensor]]:
    """Have transformers' routers send sequence after sequence where the routes say, [tokens, layers, per
    token]. Yields, for each call of a router, which known tokens it would have sent elsewhere.
    """
    found: list[torch.Tensor] = []

    def sent(layer: int, gate: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, _, own = given
        rows = routes[len(found) // SHAPE.layers][: len(own)]
        known = torch.from_numpy(~is_unknown(rows))
        index = torch.where(known[:, None], torch.from_numpy(rows[:, layer].astype(np.int64)), own)
        found.append((index.sort(-1).values != own.sort(-1).values).any(-1))
        weights = F.softmax(logits.float(), -1).gather(1, index)
        return (
            logits,
            weights / weights.sum(-1, keepdim=True) if getattr(gate, "norm_topk_prob", True) else weights,
            index,
        )

    gates = _routers(model)
    hooks = [
        gate.register_forward_hook(lambda gate, _, given, n=n: sent(n, gate, given))
        for n, gate in enumerate(gates)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def by_sample(batch: Batch, routes: Routes) -> list[np.ndarray]:
    """The routes of each sample, prompt and completion."""
    prompts = np.split(routes.prompts, np.cumsum(batch.prompt_lengths)[:-1])
    completions = np.split(routes.completions, np.cumsum(batch.completion_lengths)[:-1])
    owners = np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes)
    return [np.concatenate([prompts[o], c]) for o, c in zip(owners, completions, strict=True)]


def own_routes(model: Any, batch: Batch) -> Routes:
    """Where transformers' routers send the tokens."""
    seen: list[torch.Tensor] = []
    gates = _routers(model)
    hooks = [gate.register_forward_hook(lambda _, __, given: seen.append(given[2])) for gate in gates]
    with torch.no_grad():
        reference_logprobs(model, batch)
    for hook in hooks:
        hook.remove()
    layers = [torch.stack(seen[n : n + SHAPE.layers], 1) for n in range(0, len(seen), SHAPE.layers)]
    samples = [layer.numpy().astype(SHAPE.dtype) for layer in layers]
    firsts = np.cumsum([0, *batch.group_sizes])[:-1]
    prompts = [samples[at][:n] for at, n in zip(firsts, batch.prompt_lengths.tolist(), strict=True)]
    lengths = batch.completion_lengths.tolist()
    completions = [sample[-n:] for sample, n in zip(samples, lengths, strict=True)]
    return Routes(np.concatenate(prompts), np.concatenate(completions))


class ReplayedRoutes(TrainerCase):
    async def test_own_routes_replayed_change_no_bit(self, trainer: Trainer, base: Any) -> None:
        batch = random_batch(5)
        same = replace(batch, routes=own_routes(reference_model(base), batch))
        plain, replayed = await trainer.logprobs(BASE, batch), await trainer.logprobs(BASE, same)
        assert self.same(trainer, plain, replayed)
        await trainer.open("a", spec_for(trainer))
        stats = await accumulate(trainer, "a", same)
        norms = [(await trainer.optim_step("a", 0.0, 0.0)).grad_norm]
        await accumulate(trainer, "a", batch)
        norms.append((await trainer.optim_step("a", 0.0, 0.0)).grad_norm)
        assert norms[0] == norms[1] > 0
        assert stats.replayed > 0 == stats.rerouted == stats.unrouted

    async def test_tokens_go_where_the_routes_say(self, trainer: Trainer, base: Any) -> None:
        batch, model = random_batch(6), reference_model(base)
        routes = random_routes(batch)
        with torch.no_grad(), routed(model, by_sample(batch, routes)):
            expected = reference_logprobs(model, batch).numpy()
        found = await trainer.logprobs(BASE, replace(batch, routes=routes))
        assert abs(found - expected).max() < 1e-4
        assert abs(await trainer.logprobs(BASE, batch) - expected).max() > 0.1
        shifted = Routes(np.roll(routes.prompts, 1, 0), np.roll(routes.completions, 1, 0))
        moved = await trainer.logprobs(BASE, replace(batch, routes=shifted))
        assert abs(moved - expected).max() > 0.1

    @pytest.mark.parametrize("settings", [{}, {"tokens_per_microbatch": 9, "activation_checkpointing": True}])
    async def test_gradients_are_those_of_fixed_routes(
        self, trainer: Trainer, base: Any, settings: dict[str, Any]
    ) -> None:
        """Scores of the router get a gradient, its choice does not."""
        await open_trained(trainer, "a", **settings)
        adapter, model, batch = await trainer.export("a"), reference_model(base), random_batch(5)
        routes = random_routes(batch)
        pairs = merge(model, adapter)
        stats = await accumulate(trainer, "a", replace(batch, routes=routes))
        weights = targets_for(batch).advantages / batch.completions.size
        with routed(model, by_sample(batch, routes)):
            logprobs = reference_logprobs(model, batch)
        logprobs.backward(-logprobs.new_tensor(weights))
        expected = gradient_norm(model, pairs, adapter.config)
        norm = (await trainer.optim_step("a", 0.0, 0.0)).grad_norm
        assert norm == pytest.approx(expected, rel=1e-3)
        assert stats.rerouted > stats.replayed / 2 > stats.unrouted > 0

    async def test_slots_share_passes_and_no_routes(self, trainer: Trainer) -> None:
        """Of two slots in one call, one with routes: each has the gradient of a call of its own."""
        batch, norms, work = random_batch(5), [], []
        for slot, routes in (("a", random_routes(batch)), ("b", None)):
            await open_trained(trainer, slot)
            mine = replace(batch, routes=routes)
            await accumulate(trainer, slot, mine)
            norms.append((await trainer.optim_step(slot, 0.0, 0.0)).grad_norm)
            work.append(
                ForwardBackward(mine, targets_for(mine), PolicyLoss(), float(batch.completions.size), slot)
            )
        routed, plain = await trainer.forward_backward_many(work)
        assert routed.rerouted > 0 == plain.rerouted == plain.replayed == plain.unrouted
        again = [(await trainer.optim_step(slot, 0.0, 0.0)).grad_norm for slot in ("a", "b")]
        assert again == pytest.approx(norms, rel=1e-4)
        assert norms[0] != pytest.approx(norms[1], rel=1e-3)

    async def test_every_token_counts_once(self, trainer: Trainer, base: Any) -> None:
        """Whatever layers and ranks it passes. Prompts of one token: no layer may leave out any."""
        drawn, model = random_batch(5, groups=9, samples=1), reference_model(base)
        batch = Batch.of([(prompt[:1], completions) for prompt, completions in drawn.groups()])
        routes = random_routes(batch)
        samples = by_sample(batch, routes)
        with torch.no_grad(), routed(model, samples) as moved:
            reference_logprobs(model, batch)
        rerouted = sum(int((one | two)[:-1].sum()) for one, two in zip(moved[::2], moved[1::2], strict=True))
        unknown = np.concatenate([is_unknown(sample[:-1]) for sample in samples])
        await trainer.open("a", spec_for(trainer))
        stats = await accumulate(trainer, "a", replace(batch, routes=routes))
        assert (stats.replayed, stats.unrouted) == ((~unknown).sum(), unknown.sum())
        assert stats.rerouted == rerouted > 0

    async def test_routes_of_another_base_are_refused(self, trainer: Trainer) -> None:
        batch = random_batch(5)
        routes = random_routes(batch)
        for wrong in (
            Routes(routes.prompts[:, :1], routes.completions),
            Routes(routes.prompts, np.full_like(routes.completions, SHAPE.experts)),
            Routes(routes.prompts[:-1], routes.completions),
        ):
            with pytest.raises(ValueError, match="route"):
                await trainer.logprobs(Policy(), replace(batch, routes=wrong))
