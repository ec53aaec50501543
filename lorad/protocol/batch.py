"""Tokens on their way to an engine or a trainer. Ragged arrays are flat, with their lengths beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from msgspec import Struct

from lorad.routes import Routes
from lorad.spec.algorithm import Anchor, KlType, Preference, Ratio

Finish = Literal["stop", "length", "abort"]
FINISHES: tuple[Finish | None, ...] = (None, "stop", "length", "abort")


class Prompt(Struct, frozen=True):
    """One prompt and how many samples of it are wanted.

    tokens: int32 [P].
    seeds: uint64 [n], one for each sample. A sample depends on its own seed, the prompt, the version and the
        sampling parameters, on nothing else that is random.
    """

    id: str
    tokens: np.ndarray
    seeds: np.ndarray


class Sampling(Struct, frozen=True):
    """How to sample. Stop tokens and strings end a sample.

    A stop token is part of the sample; of a stop string, the tokens up to the one that completes it are.

    temperature: 0 is greedy.
    top_k: 0 is all.
    stream: whether tokens are read as they come; without it an engine may keep a sample back until it has
        ended, and a pool keeps what comes back for as long as a second.
    as_they_end: whether samples are read as they end, though their tokens are not read as they come.
    schema: JSON of the JSON schema that the text follows; "" for none. Only some engines can.
    logprobs: whether they are used; without it they may be of another temperature.
    routes: whether the experts are wanted that tokens are sent to. Only some engines can.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stream: bool = True
    logprobs: bool = True
    as_they_end: bool = False
    schema: str = ""
    routes: bool = False


class Chunk(Struct, frozen=True):
    """Some new tokens of one sample, which is the concatenation of its chunks; the last one has `finish`.

    version: the engine-side name of the version that made these tokens.
    tokens: int32 [t].
    logprobs: float32 [t], natural log under the temperature-scaled distribution before top-k and top-p.
    routes: the routes of all tokens of the sample (see lorad/routes.py), with the last chunk, where they are
        asked for. The last token's is not known; in sample 0 the routes of its prompt come first.
    """

    prompt: str
    index: int
    version: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: Finish | None = None
    routes: np.ndarray | None = None


class Chunks(Struct, frozen=True):
    """Chunks as they travel: many of them in few arrays. n chunks, T tokens in all; `version` made all of
    them.

    prompts: int32 [n], positions in the call's list of prompts.
    indexes: int32 [n]      lengths: int32 [n], sums to T      finishes: uint8 [n], positions in FINISHES
    tokens: int32 [T]       logprobs: float32 [T]
    routed: int32 [n], tokens of which there are routes.
    routes: theirs. None where no chunk has any.
    """

    version: str
    prompts: np.ndarray
    indexes: np.ndarray
    lengths: np.ndarray
    finishes: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    routed: np.ndarray | None = None
    routes: np.ndarray | None = None

    @classmethod
    def of(cls, version: str, chunks: Sequence[Chunk], positions: Mapping[str, int]) -> Chunks:
        """Pack chunks of one version, at least one; `positions` maps prompt ids to positions in the call."""
        routes = [chunk.routes for chunk in chunks if chunk.routes is not None]
        sizes = [0 if chunk.routes is None else len(chunk.routes) for chunk in chunks]
        return cls(
            version=version,
            prompts=np.array([positions[chunk.prompt] for chunk in chunks], np.int32),
            indexes=np.array([chunk.index for chunk in chunks], np.int32),
            lengths=np.array([chunk.tokens.size for chunk in chunks], np.int32),
            finishes=np.array([FINISHES.index(chunk.finish) for chunk in chunks], np.uint8),
            tokens=np.concatenate([chunk.tokens for chunk in chunks]),
            logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
            routed=np.array(sizes, np.int32) if routes else None,
            routes=np.concatenate(routes) if routes else None,
        )

    def split(self, prompts: Sequence[Prompt]) -> Iterator[Chunk]:
        """Yield the chunks, whose arrays are views; `prompts` are those of the call."""
        ends = np.cumsum(self.lengths).tolist()
        arrays = (self.prompts, self.indexes, self.lengths, self.finishes)
        columns = [array.tolist() for array in arrays]
        routes: Iterator[np.ndarray | None] = iter([None] * self.lengths.size)
        if self.routes is not None and self.routed is not None:
            stops = np.cumsum(self.routed).tolist()
            sizes = zip(self.routed.tolist(), stops, strict=True)
            routes = iter([self.routes[stop - size : stop] if size else None for size, stop in sizes])
        for position, index, length, finish, end in zip(*columns, ends, strict=True):
            part = slice(end - length, end)
            tokens = self.tokens[part]
            logprobs = self.logprobs[part]
            of = prompts[position].id, index, self.version
            yield Chunk(*of, tokens, logprobs, FINISHES[finish], next(routes))


class Ranked(Struct, frozen=True):
    """Log-probabilities of tokens of texts, and of the most likely ones in their places, at temperature 1.
    T tokens in all, text after text, with k others each.

    logprobs: float32 [T]     top_tokens: int32 [T, k]     top_logprobs: float32 [T, k], the largest first
    """

    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Ranked]) -> Ranked:
        """Return the texts of all parts as one."""
        columns = ([getattr(part, name) for part in parts] for name in cls.__struct_fields__)
        return cls(*map(np.concatenate, columns))

    def part(self, start: int, stop: int) -> Ranked:
        """Return some of the tokens, as views."""
        return Ranked(*(getattr(self, name)[start:stop] for name in self.__struct_fields__))


class Batch(Struct, frozen=True):
    """Samples in groups; the prompt of a group is given once. G groups, S samples in group order, T tokens in
    all, of which the policy sampled M, the targets. Arrays of numbers per token that travel beside a batch
    have M entries: a token that an environment wrote has none.

    prompts: int32 [sum(prompt_lengths)]     prompt_lengths: int32 [G]      group_sizes: int32 [G], sums to S
    completions: int32 [T]                   completion_lengths: int32 [S], sums to T
    sampled: bool [T], whether the policy sampled a token; at least one of each sample. None: it sampled all.
    routes: the routes of all tokens, which trainers of a mixture replay; None leaves it to their router. The
        last token of a sample is not computed, so its route means nothing.
    labels: int32 [M], what is predicted in the place of each target; None: the targets themselves.
    """

    prompts: np.ndarray
    prompt_lengths: np.ndarray
    group_sizes: np.ndarray
    completions: np.ndarray
    completion_lengths: np.ndarray
    sampled: np.ndarray | None = None
    routes: Routes | None = None
    labels: np.ndarray | None = None

    @property
    def targets(self) -> np.ndarray:
        """Return what is predicted, int32 [M]."""
        if self.labels is not None:
            return self.labels
        return self.completions if self.sampled is None else self.completions[self.sampled]

    @property
    def target_lengths(self) -> np.ndarray:
        """Return how many targets each sample has, int32 [S], which sum to M."""
        if self.sampled is None:
            return self.completion_lengths
        before = np.concatenate([[0], np.cumsum(self.sampled)])
        ends = np.cumsum(self.completion_lengths)
        lengths: np.ndarray = (before[ends] - before[ends - self.completion_lengths]).astype(np.int32)
        return lengths

    def check(self) -> None:
        """Raise ValueError when the lengths do not add up."""
        if int(self.prompt_lengths.sum()) != self.prompts.size:
            raise ValueError("prompt_lengths do not sum to the number of prompt tokens")
        if int(self.completion_lengths.sum()) != self.completions.size:
            raise ValueError("completion_lengths do not sum to the number of completion tokens")
        if int(self.group_sizes.sum()) != self.completion_lengths.size:
            raise ValueError("group_sizes do not sum to the number of samples")
        if self.prompt_lengths.size != self.group_sizes.size or (self.prompt_lengths < 1).any():
            raise ValueError("every group needs a prompt of at least one token")
        if (self.completion_lengths < 1).any():
            raise ValueError("every sample needs at least one token")
        if self.routes is not None and (
            len(self.routes.prompts) != self.prompts.size
            or len(self.routes.completions) != self.completions.size
        ):
            raise ValueError("every token needs a route, or none does")
        if self.labels is not None and self.labels.shape != (int(self.target_lengths.sum()),):
            raise ValueError("labels must be token ids, one for each target")
        if self.sampled is None:
            return
        if self.sampled.dtype != np.bool_ or self.sampled.shape != self.completions.shape:
            raise ValueError("sampled must be bools, one for each completion token")
        if (self.target_lengths < 1).any():
            raise ValueError("every sample needs at least one token that was sampled")

    def part(self, groups: slice) -> Batch:
        """Return some of the groups, one after another, as views."""
        samples = np.cumsum([0, *self.group_sizes])[[groups.start, groups.stop]]
        prompts = np.cumsum([0, *self.prompt_lengths])[[groups.start, groups.stop]]
        tokens = np.cumsum([0, *self.completion_lengths])[samples]
        targets = np.cumsum([0, *self.target_lengths])[samples]
        return Batch(
            prompts=self.prompts[slice(*prompts)],
            prompt_lengths=self.prompt_lengths[groups],
            group_sizes=self.group_sizes[groups],
            completions=self.completions[slice(*tokens)],
            completion_lengths=self.completion_lengths[slice(*samples)],
            sampled=None if self.sampled is None else self.sampled[slice(*tokens)],
            routes=None if self.routes is None else self.routes.part(slice(*prompts), slice(*tokens)),
            labels=None if self.labels is None else self.labels[slice(*targets)],
        )

    def groups(self) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Yield (prompt, completions) of each group, as views."""
        prompts = np.split(self.prompts, np.cumsum(self.prompt_lengths)[:-1])
        completions = np.split(self.completions, np.cumsum(self.completion_lengths)[:-1])
        start = 0
        for prompt, size in zip(prompts, self.group_sizes.tolist(), strict=True):
            yield prompt, completions[start : start + size]
            start += size

    @classmethod
    def of(
        cls, groups: list[tuple[np.ndarray, list[np.ndarray]]], sampled: list[np.ndarray] | None = None
    ) -> Batch:
        """Make a batch of (prompt, completions) groups. sampled: bool [t] of each completion."""
        completions = [c for _, group in groups for c in group]

        def flat(arrays: list[np.ndarray]) -> np.ndarray:
            return np.concatenate([np.zeros(0, np.int32), *arrays]).astype(np.int32)

        return cls(
            prompts=flat([p for p, _ in groups]),
            prompt_lengths=np.array([len(p) for p, _ in groups], np.int32),
            group_sizes=np.array([len(g) for _, g in groups], np.int32),
            completions=flat(completions),
            completion_lengths=np.array([len(c) for c in completions], np.int32),
            sampled=None if sampled is None else np.concatenate([np.zeros(0, np.bool_), *sampled]),
        )


class PolicyTargets(Struct, frozen=True):
    """What a policy loss needs beside the tokens; all float32 [M], of the targets of the batch.

    advantages: what the surrogate weighs each token with.
    sampler_logprobs: log-probabilities by the engine that sampled; None for tokens that no engine sampled.
    old_logprobs: log-probabilities by the trainer before the first update on these samples; None is the
        current policy itself (on-policy, ratio 1).
    reference_logprobs: log-probabilities by the base or the run's reference; None without a KL coefficient.
    weights: what each token's loss counts; a token of weight 0 is not trained. None: 1 for each.
    sequence_log_ratios: logarithm of the ratio of the whole sample, where `ratio` asks for that and a sample
        may have several rows. None: each row is a sample, whose ratio the trainer computes.
    """

    advantages: np.ndarray
    sampler_logprobs: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    weights: np.ndarray | None = None
    sequence_log_ratios: np.ndarray | None = None

    def part(self, tokens: slice) -> PolicyTargets:
        """Return the targets of some tokens, as views."""
        values = (getattr(self, name) for name in self.__struct_fields__)
        return PolicyTargets(*(None if array is None else array[tokens] for array in values))  # type: ignore[arg-type]


Surrogate = Literal["clip", "weighted", "soft", "divergence", "dro", "rectified", "linear", "preference"]


class PolicyLoss(Struct, frozen=True):
    """A policy-gradient loss; see `lorad/rl/loss.py` for the formulas and their sources.

    surrogate: the loss of a token. `linear` carries every loss whose derivatives the caller knows.
        `preference` is that of pairs, or of completions with a label; see `preference`.
    ratio: whether the importance ratio is that of a token or of its whole sample.
    anchor: the policy that the ratio compares with.
    clip_low, clip_high: how far the ratio, its logarithm (geometric) or the probability (divergence) moves.
    dual: the most that a token of negative advantage may count, in units of it; None is no bound.
    bounds: bounds that `weighted` has for the ratio.
    negative_bounds: bounds that it has where the advantage is not positive; the ratio of other tokens is 1
        then. None lets `bounds` hold for all.
    drops: `weighted` leaves out tokens outside of the bounds, instead of bounding their ratio.
    taus: temperatures of `soft` for positive and for other advantages.
    beta: weight of the square in `dro`.
    kl_weighed: weighs the KL term with the ratio, so that its gradient is unbiased.
    entropy_coef: weight of the entropy, which is added to what is made large.
    importance_cap: cap of the importance weights of the trainer against the engine; None is off.
    returns_logprobs: the log-probabilities before the update come back with the statistics.
    preference: the loss of pairs, in groups of a chosen and a rejected sample; of kto the loss of samples,
        whose advantages are positive where they are desired. Weights are 1 for the tokens that count, else 0,
        and the normaliser is the number of pairs or samples.
    divergence: z of kto, see `lorad/rl/pairs.py`.
    """

    surrogate: Surrogate = "clip"
    ratio: Ratio = "token"
    anchor: Anchor = "old"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual: float | None = None
    bounds: tuple[float, float] = (0.0, 5.0)
    negative_bounds: tuple[float, float] | None = None
    drops: bool = False
    taus: tuple[float, float] = (1.0, 1.05)
    beta: float = 0.1
    kl_coef: float = 0.0
    kl_type: KlType = "k3"
    kl_weighed: bool = False
    entropy_coef: float = 0.0
    importance_cap: float | None = None
    temperature: float = 1.0
    returns_logprobs: bool = False
    preference: Preference | None = None
    divergence: float = 0.0

    @property
    def has_pairs(self) -> bool:
        """Return whether the samples of a group have one loss, so that they are computed together."""
        return self.preference is not None and self.preference.loss != "kto"

    @property
    def is_of_samples(self) -> bool:
        """Return whether the loss of a token depends on the log-probabilities of its whole sample."""
        return self.ratio != "token" or self.preference is not None

    @property
    def needs(self) -> tuple[str, ...]:
        """Name what a trainer has to know for it; `LOSSES` are all that there are."""
        terms = (
            f"surrogate:{self.surrogate}",
            f"ratio:{self.ratio}",
            f"kl:{self.kl_type}" * bool(self.kl_coef),
            "entropy" * bool(self.entropy_coef),
        )
        return tuple(term for term in terms if term)


class ValueTargets(Struct, frozen=True):
    """What a value loss needs beside the tokens; all float32 [M], of the targets of the batch.

    returns: what the critic is to predict.
    values: the critic's own before its first update on these samples.
    weights: what each token's loss counts; a token of weight 0 is not trained. None: 1 for each.
    """

    returns: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None = None

    def part(self, tokens: slice) -> ValueTargets:
        """Return the targets of some of the tokens, as views."""
        weights = None if self.weights is None else self.weights[tokens]
        return ValueTargets(self.returns[tokens], self.values[tokens], weights)


class ValueLoss(Struct, frozen=True):
    """The squared error of a critic; see `lorad/rl/value_loss.py`.

    clip: how far a value may move from the one before the update and still gain by it; None is no bound.
    """

    clip: float | None = 0.2


VALUE_LOSS = "value:clip"
OF_PAIRS = "surrogate:preference"
GIVEN_RATIO = "ratio:given"  # `PolicyTargets.sequence_log_ratios`
LABELS = "labels"  # `Batch.labels`
LOSSES = (
    *(f"surrogate:{name}" for name in get_args(Surrogate)),
    *(f"ratio:{name}" for name in get_args(Ratio)),
    *(f"kl:{name}" for name in get_args(KlType)),
    "entropy",
    VALUE_LOSS,
    GIVEN_RATIO,
    LABELS,
)


class Predictions(Struct, frozen=True):
    """The predictions of a policy for the targets of a batch.

    logprobs: float32 [M].
    correct: bool [M], whether no other token was more likely than the target.
    """

    logprobs: np.ndarray
    correct: np.ndarray


class Optimizer(Struct, frozen=True):
    """AdamW (Loshchilov & Hutter, 2019, arXiv 1711.05101); the learning rate comes with each step.

    loraplus_lr_ratio: the rate of each B divided by that of each A (LoRA+: Hayou et al., 2024, arXiv
        2402.12354).
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    loraplus_lr_ratio: float = 1.0


class LossStats(Struct, frozen=True):
    """Sums over the tokens of one forward_backward, which the caller divides by `tokens`; `loss` is
    normalised.

    correct: tokens than which no other was more likely; None where they are not counted.
    capped: tokens whose importance weight was more than the cap.
    sampler_difference: sum of |trainer - engine| log-probability.
    importance_max: the greatest probability of a token by the trainer, in units of the engine's.
    replayed: tokens, in prompts too, that were sent to the experts of `Batch.routes`.
    rerouted: the part of them that the trainer's own router would have sent to others.
    unrouted: tokens of such a batch of which no route is known.
    """

    loss: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    correct: float | None = None
    kl: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    capped: float = 0.0
    sampler_difference: float = 0.0
    sampler_difference_max: float = 0.0
    importance_max: float = 0.0
    replayed: float = 0.0
    rerouted: float = 0.0
    unrouted: float = 0.0

    def __add__(self, other: LossStats) -> LossStats:
        both = {f: (getattr(self, f), getattr(other, f)) for f in LossStats.__struct_fields__}
        measured = {f: [value for value in pair if value is not None] for f, pair in both.items()}
        joined = {f: max(seen) if f.endswith("_max") else sum(seen) for f, seen in measured.items() if seen}
        return LossStats(**joined)


class Gradients(LossStats, frozen=True):
    """The statistics and the log-probabilities of one forward_backward.

    logprobs: float32 [M], where the loss asks for them.
    halved_to: tokens of a micro-batch from now on, where the device had no memory for as many; else 0.
    """

    logprobs: np.ndarray | None = None
    halved_to: int = 0

    @classmethod
    def of(cls, stats: LossStats, logprobs: np.ndarray | None = None, halved_to: int = 0) -> Gradients:
        figures = {name: getattr(stats, name) for name in LossStats.__struct_fields__}
        return cls(**figures, logprobs=logprobs, halved_to=halved_to)
