"""`/tokenize` and `/detokenize` as vLLM has them: tokens of texts and chats, texts of tokens."""

import asyncio
from typing import Any

from lorad.errors import PoolLost
from lorad.gateway.errors import refused
from lorad.gateway.own.generation import Generator
from lorad.gateway.own.prompts import of_tokenize
from lorad.gateway.params import DetokenizeWish, TokenizeWish

_Json = dict[str, Any]


async def tokenized(generator: Generator, wish: TokenizeWish, meant: str | None) -> _Json:
    """Raises ApiError, LoradError."""
    served = await generator.resolver.find(meant or wish.model)
    if served.socket is None:
        raise PoolLost(f"no pool serves {served.name} now", hint="Ask again.")
    base, peer = await generator.bases.get(served.model_path), await generator.peers.get(served.socket)
    async with base.rendering:
        tokens = await asyncio.to_thread(of_tokenize, wish, base)
    limit = min(base.max_positions, peer.info.max_tokens)
    texts = [base.token_text(token) for token in tokens] if wish.return_token_strs else None
    return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": texts}


async def detokenized(generator: Generator, wish: DetokenizeWish, meant: str | None) -> _Json:
    """Raises ApiError, LoradError."""
    served = await generator.resolver.find(meant or wish.model)
    base = await generator.bases.get(served.model_path)
    if any(token >= base.vocab for token in wish.tokens):
        raise refused("tokens", f"tokens of this model are below {base.vocab}.")
    text = await asyncio.to_thread(base.tokenizer.decode, wish.tokens, skip_special=False)
    return {"prompt": text}
