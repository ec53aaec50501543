"""The process that completes prompts with a version, as the owner of the pool that it asks:
`python -m lorad.daemon.serving.completer`.

A tokenizer and a chat template are files of a user's, which the daemon does not read: this process does, with
the rights of the user. A PoolQuestion comes on stdin; lines of AnswerLine go to stdout.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from lorad.startup import quick_imports

with quick_imports():
    import msgspec
    import numpy as np
    from msgspec.structs import replace

    from lorad.bounds import POOL_BYTES
    from lorad.daemon.serving.asking import AnswerLine, PoolQuestion
    from lorad.errors import LoradError, PoolLost, SpecError, to_wire
    from lorad.models.facts import ModelFacts, read_facts
    from lorad.protocol.batch import Chunk, Chunks, Prompt, Sampling
    from lorad.protocol.calls import Generate
    from lorad.protocol.connection import Connection
    from lorad.protocol.heartbeat import Count, Tell
    from lorad.protocol.preflight import ErrorFacts
    from lorad.records.requests import Sampling as Wish
    from lorad.records.versions import Completion, Completions
    from lorad.rl.rows.messages import with_system
    from lorad.rl.tokenizer import Tokenizer

_CHARACTERS = 128  # of the longest token


def main() -> int:
    with os.fdopen(os.dup(1), "wb") as lines:
        os.dup2(2, 1)

        def say(line: AnswerLine) -> None:
            lines.write(msgspec.json.encode(line) + b"\n")
            lines.flush()

        try:
            question = msgspec.json.decode(sys.stdin.buffer.read(), type=PoolQuestion)
            answer = _completed(question, lambda words: say(AnswerLine(doing=words)))
            say(AnswerLine(answer=msgspec.Raw(msgspec.json.encode(answer))))
        except Exception as error:
            if not isinstance(error, LoradError):
                traceback.print_exception(error)
            say(AnswerLine(error=msgspec.convert(to_wire(error), ErrorFacts)))
    return 0


def _completed(question: PoolQuestion, tell: Tell) -> Completions:
    """Complete the prompts, and tell how many completions have ended. Raises SpecError and PoolLost."""
    body = question.body
    wish = body.sampling
    model = Path(question.model_path)
    facts = read_facts(model)
    tokenizer = Tokenizer(model)
    if len(body.prompt) > _CHARACTERS * facts.max_positions:
        prompt = f"a prompt of {len(body.prompt)} characters"
        problem = f"{prompt} exceeds the {facts.max_positions} positions of the model"
        raise SpecError(problem, hint="Shorten the prompt.")
    if body.prompts:
        token_lists = body.prompts
    elif question.chat is None:
        token_lists = [tokenizer.encode(body.prompt, special=True)]
    else:  # as the run tokenizes its own prompts
        messages = with_system(question.chat, [{"role": "user", "content": body.prompt}])
        with contextlib.closing(tokenizer):
            token_lists = [tokenizer.encode(tokenizer.chat(messages, question.chat.chat_template_kwargs))]
    for tokens in token_lists:
        _refuse_unfit(tokens, wish.max_new_tokens, facts)
    prompts = _prompts(token_lists, body.seeds, wish)
    sampling = Sampling(
        logprobs=False,
        max_new_tokens=wish.max_new_tokens,
        temperature=wish.temperature,
        top_p=wish.top_p,
        top_k=wish.top_k,
        stop_token_ids=tuple(tokenizer.eos_ids),
        stop=tuple(wish.stop),
        stream=False,
    )
    completions = {(p.id, index): Completion("") for p in prompts for index in range(p.seeds.size)}
    with contextlib.closing(Connection(Path(question.socket), timeout=None, most=POOL_BYTES)) as connection:
        connection.call("load_version", question.load)
        count = Count("sampling", len(completions), tell)
        for item in connection.stream("serve", Generate(question.load.version, prompts, sampling)):
            for chunk in item.split(prompts) if isinstance(item, Chunks) else ():
                add_chunk(chunk, completions, wish.max_new_tokens)
                count.add(tokens=chunk.tokens.size, ended=chunk.finish is not None)
    texts = [replace(c, text=tokenizer.completion(c.tokens, wish.stop)) for c in completions.values()]
    return Completions(question.load.version, texts)


def _refuse_unfit(tokens: Sequence[int], new: int, facts: ModelFacts) -> None:
    """Raise SpecError for a prompt that the model cannot take."""
    if not tokens:
        raise SpecError("the prompt is empty", hint="A completion begins with at least one token.")
    if len(tokens) + new > facts.max_positions:
        prompt = f"a prompt of {len(tokens)} tokens and {new} new ones"
        problem = f"{prompt} exceed the {facts.max_positions} positions of the model"
        raise SpecError(problem, hint="Shorten the prompt or lower max_new_tokens.")
    if max(tokens) >= facts.vocab:
        hint = f"Tokens of this model are below {facts.vocab}."
        raise SpecError(f"a prompt has token {max(tokens)}, which the model does not know", hint=hint)


def _prompts(token_lists: Sequence[list[int]], seeds: Sequence[list[int]], wish: Wish) -> list[Prompt]:
    """Give each prompt its seeds. Raises SpecError for seeds that do not fit the prompts."""
    usual = wish.seed + np.arange(wish.n, dtype=np.uint64)
    if seeds and (len(seeds) != len(token_lists) or any(len(group) != wish.n for group in seeds)):
        raise SpecError(f"the seeds are not {wish.n} of each prompt", hint="Leave them out.")
    if any(seed >= 2**64 for group in seeds for seed in group):
        raise SpecError("a seed has more than 64 bits", hint="Leave it out.")
    return [
        Prompt(str(place), np.array(tokens, np.int32), np.array(seeds[place], np.uint64) if seeds else usual)
        for place, tokens in enumerate(token_lists)
    ]


def add_chunk(chunk: Chunk, completions: dict[tuple[str, int], Completion], most: int) -> None:
    """Add tokens to their completion. Raises PoolLost for an answer that does not belong to the question."""
    before = completions.get((chunk.prompt, chunk.index))
    if before is None or len(before.tokens) + chunk.tokens.size > most:
        hint = "Is it another version of lorad?"
        raise PoolLost("the pool answers with more than it was asked for", hint=hint)
    tokens = before.tokens + chunk.tokens.tolist()
    finish = chunk.finish or before.finish
    completions[chunk.prompt, chunk.index] = replace(before, tokens=tokens, finish=finish)


if __name__ == "__main__":
    sys.exit(main())
