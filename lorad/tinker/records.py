"""What the Tinker door and the lane of a model write for each other.

The logs are `tinker/requests` and `tinker/results` in the run's directory: see `lorad/tinker/log.py`.

The door writes a request before it answers the client. The lane does requests in the order of `seq`, without
a hole, and writes each result before anybody reads it. Request 0 is the door's own: the model is made.
Names of arrays, losses and settings are those of the Tinker API.
"""

from typing import Literal

import numpy as np
from msgspec import Struct

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]


class Create(Struct, frozen=True, tag="create"):
    """Open the slot as the run's spec says.

    Attributes:
        source: The directory of a checkpoint to begin with; "" for none.
        optimizer: Begin with the checkpoint's optimizer state, too.
    """

    source: str = ""
    optimizer: bool = False


class Load(Struct, frozen=True, tag="load"):
    """Load a checkpoint into the slot, whose gradients are discarded.

    Attributes:
        path: The `tinker://` path that the client sent.
        source: The directory of the checkpoint.
        optimizer: Load its optimizer state, too.
    """

    path: str
    source: str
    optimizer: bool = False


class Pass(Struct, frozen=True, tag="pass"):
    """Run D datums with N tokens in all, datum after datum, forward and perhaps backward.

    Attributes:
        tokens: What the model reads, int32 [N].
        lengths: The tokens of each datum, int32 [D]; they sum to N, and none is 0.
        targets: What is predicted behind each token, int32 [N]; need not be the next token.
        arrays: float32 [N] by name: weights for cross_entropy, logprobs and advantages for the other losses,
            with sequence_ratio_mask for gspo.
        config: The checked settings of the loss by name: clip_low_threshold, clip_high_threshold, beta. A
            setting that the client left out is missing.
        backward: Add to the gradients.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    loss: Loss
    arrays: dict[str, np.ndarray]
    config: dict[str, float] = {}
    backward: bool = True


class Step(Struct, frozen=True, tag="step"):
    """Make one step of AdamW.

    Attributes:
        grad_clip_norm: 0 is no clipping.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SaveWeights(Struct, frozen=True, tag="save_weights"):
    """Keep weights and optimizer state under a name.

    Attributes:
        ttl: Seconds after which the checkpoint expires; None is never.
    """

    name: str
    overwrite: bool = False
    ttl: float | None = None
    metadata: dict[str, str] = {}


class SaveSampler(Struct, frozen=True, tag="save_sampler"):
    """Publish the weights for sampling, as a version of the run.

    Attributes:
        name: The checkpoint's name; "" for a checkpoint that lives as long as its session.
        sampler: The id of the sampling session that is made of it; "" where there is a name.
    """

    name: str = ""
    sampler: str = ""
    ttl: float | None = None
    metadata: dict[str, str] = {}


class Unload(Struct, frozen=True, tag="unload"):
    """End the model: the run is completed."""


class Refused(Struct, frozen=True, tag="refused"):
    """A numbered request that the door found fault with: it fails in its turn, so that no number is missing.

    Attributes:
        poisons: The request was to add to the gradients, so the next step fails too and discards them.
    """

    message: str
    poisons: bool = False


Arguments = Create | Load | Pass | Step | SaveWeights | SaveSampler | Unload | Refused


class Request(Struct, frozen=True):
    """One request of a model.

    Attributes:
        at: When it came, in Unix seconds.
        digest: The sha256 (hex) of what the client sent; the same seq with another digest is an error of the
            client.
    """

    seq: int
    at: float
    digest: str
    arguments: Arguments


class Created(Struct, frozen=True, tag="created"):
    """The slot is open; the model can be trained."""


class Passed(Struct, frozen=True, tag="passed"):
    """The result of a pass.

    Attributes:
        logprobs: The log-probability of every target, float32 [N].
        lengths: The tokens of each datum, int32 [D], as in `Pass`.
        metrics: Numbers by names that end in `:sum`, `:mean`, `:min` or `:max`, among them `loss:sum`.
    """

    logprobs: np.ndarray
    lengths: np.ndarray
    metrics: dict[str, float]


class Stepped(Struct, frozen=True, tag="stepped"):
    metrics: dict[str, float]


class Saved(Struct, frozen=True, tag="saved"):
    """A checkpoint was saved.

    Attributes:
        directory: Its directory, relative to the run's.
        bytes: The size of its files.
    """

    name: str
    directory: str
    bytes: int = 0
    expires: float | None = None
    metadata: dict[str, str] = {}


class Published(Struct, frozen=True, tag="published"):
    """A version was published for sampling.

    Attributes:
        version: The number of the run's version.
    """

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
    """A request failed.

    Attributes:
        message: Shown to the user of the client as it is.
    """

    message: str
    category: Literal["user", "server"] = "user"


class Snapshot(Struct, frozen=True, tag="snapshot"):
    """A checkpoint of the run has all requests up to the seq of this record, which nobody needs any more."""

    step: int


class Waiting(Struct, frozen=True, tag="waiting"):
    """The lane does not begin with the seq of this record yet.

    Attributes:
        reason: Why, for the client's user; "" when the lane begins.
    """

    reason: str


Outcome = Created | Passed | Stepped | Saved | Published | Loaded | Unloaded | Failed | Snapshot | Waiting


class Result(Struct, frozen=True):
    """A record of the lane. A seq's first record that is neither Snapshot nor Waiting is its result."""

    seq: int
    at: float
    outcome: Outcome
