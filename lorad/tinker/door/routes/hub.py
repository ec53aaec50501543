"""Serves tokenizer files of the bases as the Hugging Face hub does: small text files alone, never weights.

With it, `get_tokenizer()` of a client with HF_ENDPOINT set to the door works without the hub.
"""

import asyncio
import hashlib
from pathlib import Path

from aiohttp import web

from lorad.gateway.guard import answer

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)
_COMMIT = {"X-Repo-Commit": f"{1:040}"}  # there is one state of each base
_NAME = "{name:[^/]+(?:/[^/]+)?}"  # the hub has names without an owner, too: gpt2


def add_hub(app: web.Application, bases: dict[str, Path]) -> None:
    """Answer without a key: the hub's client sends none to the door."""

    def files_of(request: web.Request) -> dict[str, Path] | None:
        directory = bases.get(request.match_info["name"])
        if directory is None:
            return None
        return {name: directory / name for name in _FILES if (directory / name).is_file()}

    async def info(request: web.Request) -> web.Response:
        if (files := files_of(request)) is None:
            return _missing("RepoNotFound")
        about = {"id": request.match_info["name"], "sha": _COMMIT["X-Repo-Commit"]}
        siblings = [{"rfilename": file} for file in files]
        return answer(about | {"siblings": siblings, "private": False, "tags": []})

    async def tree(request: web.Request) -> web.Response:
        if (files := files_of(request)) is None:
            return _missing("RepoNotFound")
        return answer(
            [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _COMMIT["X-Repo-Commit"]}
                for name, path in files.items()
            ]
        )

    async def resolve(request: web.Request) -> web.Response:
        if (files := files_of(request)) is None:
            return _missing("RepoNotFound")
        if (path := files.get(request.match_info["file"])) is None:
            return _missing("EntryNotFound")
        data = await asyncio.to_thread(path.read_bytes)
        tag = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        return web.Response(body=data, headers=tag | _COMMIT, content_type="application/octet-stream")

    app.router.add_get(f"/api/models/{_NAME}", info)
    app.router.add_get(f"/api/models/{_NAME}/revision/{{revision}}", info)
    app.router.add_get(f"/api/models/{_NAME}/tree/{{revision}}", tree)
    app.router.add_get(f"/{_NAME}/resolve/{{revision}}/{{file:.*}}", resolve)


def _missing(code: str) -> web.Response:
    return web.Response(status=404, headers={"X-Error-Code": code} | _COMMIT)
