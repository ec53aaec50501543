"""What the Tinker door and the lane of a model write for each other: the logs `tinker/requests` and
`tinker/results` in the run's directory, see `lorad/tinker/log.py`.

The door writes a request before it answers the client. The lane does requests in the order of `seq`, without
a hole, and writes each result before anybody reads it. Request 0 is the door's own: the model is made.
Names of arrays, losses and settings are those of the Tinker API.
"""

from typing import Literal

import numpy as np
from msgspec import Struct

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
Category = Literal["user", "server"]


class Create(Struct, frozen=True, tag="create"):
    """Open the slot as the run's spec says.

    source: directory of a checkpoint to begin with; "" for none. optimizer: whether with its optimizer state.
    """

    source: str = ""
    optimizer: bool = False


class Load(Struct, frozen=True, tag="load"):
    """Replace weights, and with `optimizer` its state, by those of a checkpoint's directory; gradients go.

    path: the `tinker://` path that the client gave.
    """

    path: str
    source: str
    optimizer: bool = False


class Pass(Struct, frozen=True, tag="pass"):
    """Forward, and with `backward` add to the gradients. D datums with N tokens in all, datum after datum.

    tokens: int32 [N], what the model reads. lengths: int32 [D], sums to N, none is 0.
    targets: int32 [N], what is predicted behind each token; need not be the next token.
    arrays: float32 [N] by name. cross_entropy: weights. The others: logprobs, advantages; gspo:
        sequence_ratio_mask too.
    config: settings of the loss by name: clip_low_threshold, clip_high_threshold, beta. Checked, and without
        those that the client left out.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    loss: Loss
    arrays: dict[str, np.ndarray]
    config: dict[str, float] = {}
    backward: bool = True


class Step(Struct, frozen=True, tag="step"):
    """One step of AdamW. grad_clip_norm: 0 is no clipping."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SaveWeights(Struct, frozen=True, tag="save_weights"):
    """Keep weights and optimizer state under a name. ttl: seconds; None is for ever."""

    name: str
    overwrite: bool = False
    ttl: float | None = None
    metadata: dict[str, str] = {}


class SaveSampler(Struct, frozen=True, tag="save_sampler"):
    """Publish the weights for sampling: a version of the run.

    name: of the checkpoint; "" for one that lives as long as its session.
    sampler: id of the sampling session that is made of it; "" where there is a name.
    """

    name: str = ""
    sampler: str = ""
    ttl: float | None = None
    metadata: dict[str, str] = {}


class Unload(Struct, frozen=True, tag="unload"):
    """The end of the model: the run is completed."""


class Refused(Struct, frozen=True, tag="refused"):
    """A numbered request that the door found fault with: it fails in its turn, so that no number is missing.

    poisons: it was to add to the gradients, so the next step fails too and discards them.
    """

    message: str
    poisons: bool = False


Arguments = Create | Load | Pass | Step | SaveWeights | SaveSampler | Unload | Refused


class Request(Struct, frozen=True):
    """One request of a model.

    at: Unix seconds when it came.
    digest: sha256 (hex) of what the client sent; the same seq with another digest is an error of the client.
    """

    seq: int
    at: float
    digest: str
    arguments: Arguments


class Created(Struct, frozen=True, tag="created"):
    """The slot is open; the model can be trained."""


class Passed(Struct, frozen=True, tag="passed"):
    """The result of a pass.

    logprobs: float32 [N], of every target. lengths: int32 [D], as in `Pass`.
    metrics: by names that end in `:sum`, `:mean`, `:min` or `:max`, among them `loss:sum`.
    """

    logprobs: np.ndarray
    lengths: np.ndarray
    metrics: dict[str, float]


class Stepped(Struct, frozen=True, tag="stepped"):
    metrics: dict[str, float]


class Saved(Struct, frozen=True, tag="saved"):
    """directory: relative to the run's. bytes: of its files."""

    name: str
    directory: str
    bytes: int = 0
    expires: float | None = None
    metadata: dict[str, str] = {}


class Published(Struct, frozen=True, tag="published"):
    """version: number of the run's version. name, sampler: see `SaveSampler`."""

    version: int
    name: str = ""
    sampler: str = ""
    directory: str = ""
    sha256: str = ""
    bytes: int = 0
    expires: float | None = None
    metadata: dict[str, str] = {}


class Loaded(Struct, frozen=True, tag="loaded"):
    path: str


class Unloaded(Struct, frozen=True, tag="unloaded"):
    pass


class Failed(Struct, frozen=True, tag="failed"):
    """message: shown to the user of the client as it is."""

    message: str
    category: Category = "user"


class Snapshot(Struct, frozen=True, tag="snapshot"):
    """All requests up to the seq of its record are in a checkpoint of the run, and needed no more."""

    step: int


class Waiting(Struct, frozen=True, tag="waiting"):
    """Why the lane does not begin with the seq of its record, for the client's user; "" when it does."""

    reason: str


Outcome = Created | Passed | Stepped | Saved | Published | Loaded | Unloaded | Failed | Snapshot | Waiting


class Result(Struct, frozen=True):
    """A record of the lane. The first one of a seq that is neither Snapshot nor Waiting is its result."""

    seq: int
    at: float
    outcome: Outcome
