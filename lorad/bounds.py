"""Every limit on what users, their code and their files can feed lorad, in one place.

All are far above what is useful. What exceeds them is refused with a message, or cut where a run must not
fail for it.
"""

from dataclasses import dataclass

_KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Data
ROW_BYTES = 64 * MIB  # of one line: problems with all of their test cases have 20

KEPT_BYTES = 16 * GIB  # of rows that a user's checks and runs made ready; a million short chats take 1.5 GiB

# Requests to the daemon
BODY_BYTES = 4 * MIB  # of the JSON of the largest, which has the tokens of many prompts; beyond: 413
SPEC_BODY_BYTES = 1 * MIB  # of one that brings a spec
SMALL_BODY_BYTES = 64 * _KIB  # of any other, and so of all its texts together
NAME_CHARACTERS = 256  # of a name; what makes one has a narrower rule of its own
PATH_CHARACTERS = 4096
NAMES = 1000  # that one request may list
COMPLETIONS = 4096  # that one request may ask for
PROMPTS = 1024
PROMPT_TOKENS = 1 << 18  # of all its prompts, as an evaluation asks: 7 bytes of JSON each
ANSWER_PAGE_BYTES = 4 * MIB  # of events or results in one answer: the newest that fit
RESULTS = 100  # of evaluations that are kept with one version: the newest
# of events, written to a follower at a time; what it has not read waits in the database
STREAM_BYTES = 64 * _KIB

# Bundles: files that come with a spec from another machine
BUNDLE_BYTES = 64 * MIB
BUNDLE_FILES = 1000
BUNDLE_PART = 2 * MIB  # that one request brings; JSON makes a third more of it
BUNDLES = 64  # of one user

# Specs and config.yaml
SPEC_BYTES = 256 * _KIB
YAML_NODES = 10_000  # keys, values and lists, aliases counted each time
YAML_DEPTH = 32
YAML_ALIASES = 20
YAML_KEY = 128  # characters
YAML_DIGITS = 40  # of one number
OVERRIDES = 256
OVERRIDE_CHARACTERS = 8 * _KIB  # of one
OVERRIDES_CHARACTERS = 32 * _KIB  # of all that a request gives, or a run has
POINTS = 256  # of a sweep

# Python files of users
CODE_BYTES = 4 * MIB

# Aliases of one user
ALIASES = 1024
FOREIGN_ALIASES = 16  # those that serve versions of others: each keeps a version loaded, and its files

# Journals: what a driver, or code that it runs, can feed
RECORD_BYTES = 8 * MIB  # one record; a step of 100,000 prompts fits
JOURNAL_BYTES = 256 * MIB  # of a journal that is verified, whose records are all in memory then
METRICS = 256  # of one step: the first by name stay
METRIC_NAME = 128  # characters
EVENT_BYTES = 256 * _KIB  # part of a record that an event holds beside the ids of its prompts
TEXT = 16 * _KIB  # characters of a message: a warning, a reason, an attestation

# Files of samples and logs, when they are shown
SAMPLES_BYTES = 1 * GIB  # the file of one step
SAMPLE_TEXT = 256 * _KIB  # characters of one text in an answer
ANSWER_BYTES = 64 * MIB  # of samples in one answer
LINE_CHARACTERS = 16 * _KIB  # of one line of a log

# Answers of pools, which are processes of users
POOL_BYTES = 64 * MIB  # in one frame
STATUS_BYTES = 1 * MIB  # what it says of itself; 64 versions and as many runs are 20 KiB
TRIAL_SAMPLES = 256  # of one trial of a spec
POOL_TOKENS = 1 << 20  # of all completions of one request to the daemon

# Answers of checks of specs, in which user code is imported
CHECK_BYTES = 4 * MIB  # the modules of an adapter on every expert of the largest mixtures need 3
CHECK_NAMES = 1 << 17  # modules; those mixtures have 71,000
CHECK_WARNINGS = 256
LINE = 4096  # characters of a name or a path; Linux has none that is longer

# Files of adapters and models
ADAPTER_BYTES = 16 * GIB  # rank 256 on every linear of 70 billion parameters is 13 GiB in fp32
ALPHA = 1_000_000  # larger ones, as 1e300, may be no number in float32
ADAPTER_HEADER = 32 * MIB  # 14,000 tensors of a large mixture of experts need 5 MiB
JSON_BYTES = 64 * MIB  # a JSON file of a tokenizer
CONFIG_BYTES = 4 * MIB  # one of settings, of an adapter or a model
INDEX_BYTES = 32 * MIB  # one of the names of a model's tensors
_SECRET_BYTES = 64 * _KIB
SPARSE = 16 * MIB  # holes in files smaller than this hurt nobody

# Chat templates: programs that come with a model
TEMPLATE_SECONDS = 3.0  # of a processor, for one chat; real ones take a millisecond
TEMPLATE_MEMORY = 1 * GIB
TEMPLATE_TEXT = 16 * MIB  # characters of one prompt


@dataclass(frozen=True)
class Bounds:
    """How long connections may take, in seconds, and how many there may be.

    head: time from a request's first byte, or the connection's beginning, to the end of its headers.
    body: time from there to its last byte.
    idle: time between two requests.
    write: time without a byte taken by the reader.
    of_one: connections of one user.
    of_own: connections of the process's own user, who could as well end it. A look every second adds
        up to one.
    """

    head: float = 9.0
    body: float = 9.0
    idle: float = 30.0
    write: float = 30.0
    of_one: int = 64
    of_own: int = 512
