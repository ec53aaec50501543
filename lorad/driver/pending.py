"""Samples in a checkpoint, made by older versions for the steps to come: a resume trains on the same.

Prompts are not among them, but their place in the data, where a resume finds them again.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace as changed

from lorad.driver.rewards import Score, Scoring
from lorad.driver.session import Episode, Plan, Rollout, Sample, Session
from lorad.errors import IntegrityError
from lorad.protocol.journal import Record
from lorad.records.episodes import Fork
from lorad.rl.data import Example
from lorad.routes import unknown_like

_FILE = "rollouts.msgpack"
# fields that a rollout and its record have alike
_ALIKE = ("places", "consumed", "sampled", "seconds", "waited", "left_out")


class _KeptRoutes(Struct, frozen=True):
    """The routes of samples.

    dtype: little-endian.
    of_token: how many layers and experts a token has.
    """

    dtype: str
    of_token: tuple[int, int]
    tokens: bytes
    prompts: bytes

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _KeptRoutes | None:
        like = next((sample.routes for sample in samples if sample.routes is not None), None)
        if like is None:
            return None
        tokens = [unknown_like(like, s.tokens.size) if s.routes is None else s.routes for s in samples]
        prompts = [
            unknown_like(like, size) if not s.prompt_routes else s.prompt_routes[row]
            for s in samples
            if s.episode is not None or s.index == 0
            for row, size in enumerate(_prompts(s))
        ]
        dtype = like.dtype.newbyteorder("<")
        parts = (np.concatenate(some).astype(dtype).tobytes() for some in (tokens, prompts))
        return cls(dtype.str, like.shape[1:], *parts)

    def added_to(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples with their routes."""
        tokens, prompts = (
            np.frombuffer(part, self.dtype)
            .astype(np.dtype(self.dtype).newbyteorder("="))
            .reshape(-1, *self.of_token)
            for part in (self.tokens, self.prompts)
        )
        routed: list[Sample] = []
        at = begin = 0
        for sample in samples:
            of_prompts: tuple[np.ndarray, ...] = routed[-1].prompt_routes if routed else ()
            if sample.episode is not None or sample.index == 0:
                ends = np.cumsum([begin, *_prompts(sample)]).tolist()
                of_prompts = tuple(prompts[slice(*ends_)] for ends_ in itertools.pairwise(ends))
                begin = ends[-1]
            own_tokens = tokens[at : at + sample.tokens.size]
            routed.append(changed(sample, routes=own_tokens, prompt_routes=of_prompts))
            at += sample.tokens.size
        return routed


def _prompts(sample: Sample) -> list[int]:
    """Return the sizes of the prompts of a sample's rows."""
    return [len(sample.example.tokens), *(len(fork.prompt) for fork in sample.forks)]


class _KeptRollout(Struct, frozen=True):
    """A rollout, as a checkpoint keeps it.

    places: where its prompts are behind `position`.
    consumed, sampled, made, seconds, waited: see `Rollout`, which has `made` as `tokens`.
    digest: sha256 of the prompts.
    tokens, logprobs: int32 and float32, little-endian, of all samples in order, which have `lengths`.
    scores: None where one failed; a resume scores all again, perhaps with a reward that was mended.
    episodes: None for a completion; empty where all are completions, as `forks`, `masks` and `beginnings`
        are.
    masks: bool, which tokens were sampled.
    beginnings: text and tokens of the prompt of each sample.
    left_out: see `Rollout`.
    routes: routes of all tokens, then of the prompt of each row; completions of a group share their first's.
    """

    step: int
    position: int
    version: int
    trained: int
    places: list[int]
    consumed: int
    sampled: int
    made: int
    digest: str
    lengths: list[int]
    finishes: list[str]
    tokens: bytes
    logprobs: bytes
    scores: list[Score] | None
    seconds: float
    waited: float
    episodes: list[Episode | None] = []
    forks: list[tuple[Fork, ...]] = []
    masks: bytes = b""
    beginnings: list[tuple[str, list[int]]] = []
    routes: _KeptRoutes | None = None
    left_out: dict[str, float] = {}


def write(directory: Path, rollouts: Sequence[Rollout]) -> None:
    """Write rollouts into a checkpoint that is being written; no file where there are none."""
    records = list[_KeptRollout]()
    for rollout in rollouts:
        planned = rollout.plan
        samples = rollout.samples
        scores = rollout.scoring.scores()
        examples = [group[0].example for group in rollout.groups]
        episodes = [sample.episode for sample in samples]
        episodes = episodes if any(episodes) else []
        masks = (b"\1" * s.tokens.size if s.sampled is None else s.sampled.tobytes() for s in samples)
        record = _KeptRollout(
            step=planned.step,
            position=planned.position,
            version=planned.version,
            trained=planned.trained,
            made=rollout.tokens,
            digest=_digest(examples, of_rows=bool(episodes)),
            lengths=[sample.tokens.size for sample in samples],
            finishes=[sample.finish for sample in samples],
            tokens=np.concatenate([sample.tokens for sample in samples]).astype("<i4").tobytes(),
            logprobs=np.concatenate([sample.logprobs for sample in samples]).astype("<f4").tobytes(),
            scores=None if any(score.value is None for score in scores) else scores,
            episodes=episodes,
            forks=[sample.forks for sample in samples] if episodes else [],
            masks=b"".join(masks) if episodes else b"",
            beginnings=[(s.example.prompt, s.example.tokens) for s in samples] if episodes else [],
            routes=_KeptRoutes.of(samples),
            **{name: getattr(rollout, name) for name in _ALIKE},
        )
        records.append(record)
    if records:
        (directory / _FILE).write_bytes(msgspec.msgpack.encode(records))


def read(session: Session, checkpoint: Path, facts: Sequence[Record]) -> list[Rollout]:
    """Read the rollouts of a checkpoint that may be trained on in the steps that follow it, in order.

    The first one that may not, and the ones after it, are sampled again, and a warning says why. Raises
    IntegrityError for a rollout of a version that the `facts`, the surviving lineage, do not list as attested
    at its step.
    """
    path = checkpoint / _FILE
    if not session.spec.rollout.max_staleness or not path.exists():
        return []
    rollouts = msgspec.msgpack.decode(path.read_bytes(), type=list[_KeptRollout])
    attested = [(r.step, r.data["version"]) for r in facts if r.kind == "version"]
    for rollout in rollouts:
        # the version with the weights of a step is of the last step until then that published any
        newest = max((step for step, _ in attested if step <= rollout.trained), default=None)
        if (newest, rollout.version) not in attested:
            raise IntegrityError(
                f"{path} holds samples of {session.name_of(rollout.version)}, and the journal has no such "
                f"version of step {rollout.trained} that counts",
                hint=f"Continue from another checkpoint: `lorad checkpoints {session.params.run}`.",
            )
    usable = list[Rollout]()
    limit = session.spec.rollout.max_staleness
    for rollout in rollouts:
        rows = session.train_data.take(rollout.position, rollout.places[-1] + 1)
        examples = [rows[place] for place in rollout.places]
        is_changed = _digest(examples, of_rows=bool(rollout.episodes)) != rollout.digest
        why = "is older than rollout.max_staleness allows" if rollout.step - rollout.trained > limit else ""
        why = why or ("saw other prompts than there are now" if is_changed else "")
        if why:
            session.warn(
                f"the version that made the samples in the checkpoint for step {rollout.step + 1} {why}: "
                "they are made again, by the next one"
            )
            break
        usable.append(_rollout(session, rollout, examples))
    return usable


def _rollout(session: Session, kept: _KeptRollout, examples: list[Example]) -> Rollout:
    size = len(kept.lengths) // len(kept.places)
    each = [example for example in examples for _ in range(size)]
    if kept.episodes:
        begun = zip(each, kept.beginnings, strict=True)
        each = [changed(example, prompt=text, tokens=tokens) for example, (text, tokens) in begun]
    version = session.name_of(kept.version)
    cuts = np.cumsum(kept.lengths)[:-1]
    tokens = np.split(np.frombuffer(kept.tokens, "<i4").astype(np.int32), cuts)
    logprobs = np.frombuffer(kept.logprobs, "<f4").astype(np.float32)
    episodes = kept.episodes or [None] * len(tokens)
    forks = kept.forks or [()] * len(tokens)
    encoded = kept.masks if kept.episodes else b"\1" * sum(kept.lengths)
    masks = np.split(np.frombuffer(encoded, np.bool_), cuts)
    of_samples = np.split(logprobs, np.cumsum([mask.sum() for mask in masks])[:-1])
    texts = [
        session.tokenizer.completion(part.tolist(), session.spec.rollout.stop)
        if episode is None
        else episode.text
        for part, episode in zip(tokens, episodes, strict=True)
    ]
    sampled = [None if episode is None else mask for episode, mask in zip(episodes, masks, strict=True)]
    rows = zip(each, tokens, of_samples, kept.finishes, texts, sampled, episodes, forks, strict=True)
    samples = [Sample(row[0], i % size, version, *row[1:]) for i, row in enumerate(rows)]
    samples = samples if kept.routes is None else kept.routes.added_to(samples)
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    if kept.scores:
        scoring = Scoring.of(kept.scores)
    else:
        scorings = list[tuple[Scoring, list[int]]]()
        for own, places in session.parts(examples, "train"):  # by who judges them
            part = [groups[place] for place in places]
            if own.hosts is not None:  # an episode has the reward that it ended with
                scoring = Scoring.of([s.episode.score for group in part for s in group if s.episode])
            else:
                own.rewarder.start()
                raw = own.rewarder.wants_raw
                inputs = [[s.for_reward(own.tokenizer, raw=raw) for s in group] for group in part]
                scoring = own.rewarder.begin(inputs)
            scorings.append((scoring, places))
        scoring = Scoring.together(scorings, size)
    return Rollout(
        plan=Plan(kept.step, examples, kept.position, kept.version, kept.trained),
        groups=groups,
        tokens=kept.made,
        scoring=scoring,
        **{name: getattr(kept, name) for name in _ALIKE},
    )


def _digest(examples: Sequence[Example], *, of_rows: bool) -> str:
    """Return a digest of prompts or, where an environment makes a prompt of each row, of rows."""
    content = [(e.id, e.row if of_rows else e.tokens, e.answer) for e in examples]
    return hashlib.sha256(msgspec.json.encode(content, enc_hook=str)).hexdigest()
