"""Play episodes with a version through the daemon, as a run plays those of its evaluations."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from msgspec.structs import replace

from lorad.bounds import POOL_TOKENS, PROMPT_TOKENS, PROMPTS
from lorad.client.client import Client
from lorad.driver.sampling.episodes import play
from lorad.driver.sampling.generate import Ended, SampleJob
from lorad.driver.session import Plan, Sample
from lorad.envs.host import Hosts
from lorad.envs.programs import is_program
from lorad.envs.rendered import open_format
from lorad.errors import Conflict
from lorad.protocol.batch import Chunk, Finish, Prompt, Sampling
from lorad.protocol.calls import Generated
from lorad.protocol.heartbeat import Count
from lorad.records import requests
from lorad.rl.data import EVAL_SEED, Example
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.model import Spec

_AT_ONCE = 256  # episodes


def played(
    client: Client,
    version: str,
    spec: Spec,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    sampling: requests.Sampling,
    cwd: Path,
) -> Iterator[list[Sample]]:
    """Yield the episodes of each example, in order.

    version: run@number.
    cwd: where the environment's file is looked for.

    Raises Conflict for an agent program, SpecError, and what the daemon raises.
    """
    if is_program(spec.env, cwd):
        raise Conflict(
            f"{spec.env.name} is an agent program, whose episodes this command does not play",
            hint="Add a set to eval.sets of the run.",
        )
    hosts = Hosts(spec.env, cwd, open_format(spec, tokenizer))
    how = Sampling(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=tuple(tokenizer.eos_ids),
    )
    ask = partial(_spoken, client, sampling)
    step = max(1, _AT_ONCE // sampling.n)
    try:
        for first in range(0, len(examples), step):
            batch = [*examples[first : first + step]]
            job = SampleJob(Plan(0, batch, 0, 0, 0), sampling.n, how, EVAL_SEED, is_eval=True)
            groups, _ = play(spec, version, hosts, ask, job)
            print(f"{first + len(batch)} of {len(examples)} problems", file=sys.stderr, flush=True)
            yield from groups
    finally:
        hosts.close()


def _spoken(
    client: Client,
    sampling: requests.Sampling,
    version: str,
    prompts: list[Prompt],
    how: Sampling,
    ended: Ended,
    count: Count,
) -> Generated:
    turns = [
        (place, index, prompt.tokens.tolist(), int(seed))
        for place, prompt in enumerate(prompts)
        for index, seed in enumerate(prompt.seeds)
    ]
    longest = max((len(tokens) for _, _, tokens, _ in turns), default=1)
    most = max(1, min(PROMPTS, POOL_TOKENS // sampling.max_new_tokens, PROMPT_TOKENS // longest))
    for first in range(0, len(turns), most):
        batch = turns[first : first + most]
        contexts = [tokens for _, _, tokens, _ in batch]
        seeds = [[seed] for *_, seed in batch]
        answer = client.complete(version, contexts, seeds, replace(sampling, n=1))
        for (place, index, _, _), completion in zip(batch, answer.completions, strict=True):
            tokens = np.array(completion.tokens, np.int32)
            count.add(tokens=tokens.size)
            finish = cast(Finish | None, completion.finish)
            chunk = Chunk(str(place), index, version, tokens, np.zeros(tokens.size, np.float32), finish)
            ended(place, index, [chunk])
    return Generated(0, 0, 0.0)
