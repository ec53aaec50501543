"""Log-probabilities of prompts and of tokens that were not chosen, tokens of texts, and whether it is up."""

import dataclasses
from typing import Any

import msgspec
import openai as sdk
import pytest
from openai import OpenAI

from lorad.gateway.own.bases import Peers
from tests.kit.gateway_kit import World, http

pytest_plugins = ["tests.kit.gateway_fixtures"]
TEXT = "7 3 1"
BEGINS = [TEXT, TEXT, "4", "4"]


def complete(client: OpenAI, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": "bot", "prompt": TEXT, "temperature": 0, "max_tokens": 6} | more
    return client.completions.create(**asked)


def test_an_echo_scores_what_sampling_said(client: OpenAI) -> None:
    made = complete(client, logprobs=0).choices[0]
    again = complete(client, prompt=TEXT + made.text, echo=True, max_tokens=0, logprobs=1).choices[0]
    assert (again.text, again.finish_reason) == (TEXT + made.text, "length")
    found = again.logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    size = len(made.text)
    assert found.token_logprobs[-size:] == pytest.approx(made.logprobs.token_logprobs[:size], abs=1e-4)
    tops = found.top_logprobs[-size:]
    assert all(
        max(top.values()) == value for top, value in zip(tops, found.token_logprobs[-size:], strict=True)
    )
    assert "".join(found.tokens) == again.text and found.text_offset == list(range(len(again.text)))


def test_an_echo_begins_with_the_prompt(client: OpenAI) -> None:
    made = complete(client).choices[0].text
    answer = complete(client, prompt=[TEXT, "4"], echo=True, n=2, best_of=2)
    begins = [choice.text[: len(begin)] for choice, begin in zip(answer.choices, BEGINS, strict=True)]
    assert begins == BEGINS and answer.choices[0].text == TEXT + made
    whole = complete(client, echo=True, logprobs=2)
    size = len(TEXT) + whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.tokens) == len(whole.choices[0].logprobs.top_logprobs) == size
    assert complete(client, echo=True, max_tokens=0).choices[0].text == TEXT


def test_alternatives_are_the_most_likely_tokens(client: OpenAI) -> None:
    found = complete(client, logprobs=3, prompt=[TEXT, "4 4"]).choices[1].logprobs
    for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3 and max(top.values()) == value  # greedy
    sampled = complete(client, logprobs=1, temperature=2, seed=5).choices[0].logprobs
    assert max(map(len, sampled.top_logprobs)) == 2  # also the token itself


@pytest.mark.system
def test_a_stream_has_the_alternatives_of_the_whole(client: OpenAI) -> None:
    asked: Any = {
        "model": "bot",
        "messages": [{"role": "user", "content": TEXT}],
        "seed": 3,
        "max_tokens": 40,
    }
    asked |= {"logprobs": True, "top_logprobs": 2, "n": 2}
    whole = client.chat.completions.create(**asked)
    told: list[list[Any]] = [[], []]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            told[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice in whole.choices:
        expected = choice.logprobs.content
        assert [token.token for token in told[choice.index]] == [token.token for token in expected]
        values = [[top.logprob for top in token.top_logprobs] for token in told[choice.index]]
        assert values == [
            pytest.approx([top.logprob for top in token.top_logprobs], abs=1e-4) for token in expected
        ]
        assert all(len(token.top_logprobs) == 2 for token in expected)


def test_token_ids_come_where_they_are_wanted(client: OpenAI, world: World) -> None:
    more: Any = {"extra_body": {"return_token_ids": True}}
    whole = complete(client, **more).choices[0]
    assert len(whole.prompt_token_ids) == len(TEXT)
    streamed = [chunk.choices[0] for chunk in complete(client, stream=True, **more)]
    assert [token for choice in streamed for token in choice.token_ids] == whole.token_ids
    assert streamed[0].prompt_token_ids == whole.prompt_token_ids
    asked: Any = {
        "model": "bot",
        "messages": [{"role": "user", "content": TEXT}],
        "temperature": 0,
        "max_tokens": 6,
    }
    chat: Any = client.chat.completions.create(**asked, **more)
    assert chat.prompt_token_ids == whole.prompt_token_ids and chat.choices[0].token_ids == whole.token_ids
    parts: Any = list(client.chat.completions.create(**asked, **more, stream=True))
    assert parts[0].prompt_token_ids == whole.prompt_token_ids
    ids = [token for part in parts for token in getattr(part.choices[0], "token_ids", None) or []]
    assert ids == whole.token_ids


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
    ],
)
def test_log_probabilities_that_cannot_be_are_refused(
    client: OpenAI, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(sdk.BadRequestError) as caught:
        complete(client, **more)
    assert caught.value.param == param


def test_an_engine_that_cannot_is_refused_by_name(
    client: OpenAI, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pool of an older lorad says it."""

    async def older(peers: Peers, socket: str) -> Any:
        peer = await get(peers, socket)
        return dataclasses.replace(peer, info=msgspec.structs.replace(peer.info, ranks=False))

    get = Peers.get
    monkeypatch.setattr(Peers, "get", older)
    chat: Any = {"messages": [{"role": "user", "content": TEXT}]}
    for path, more, param in (
        ("completions", {"prompt": TEXT, "echo": True, "logprobs": 1}, "echo"),
        ("completions", {"prompt": TEXT, "logprobs": 1}, "logprobs"),
        ("chat/completions", chat | {"logprobs": True, "top_logprobs": 1}, "top_logprobs"),
        ("chat/completions", chat | {"response_format": {"type": "json_object"}}, "response_format"),
    ):
        with http(world.home) as plain:
            answer = plain.post(f"/v1/{path}", json={"model": "bot", **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_texts_and_chats_become_tokens_and_back(world: World) -> None:
    world.point("bot", 0)
    with http(world.home) as plain:
        text = plain.post(
            "/tokenize", json={"model": "bot", "prompt": TEXT, "return_token_strs": True}
        ).json()
        assert (text["count"], text["token_strs"]) == (5, list(TEXT)) and text["max_model_len"] > 1000
        chat = {"model": "sorter@0", "messages": [{"role": "user", "content": TEXT}]}
        assert plain.post("/tokenize", json=chat).json()["tokens"] == text["tokens"]
        back = plain.post("/detokenize", json={"model": "bot", "tokens": text["tokens"]})
        assert back.json() == {"prompt": TEXT}
        for path, body in (
            ("tokenize", {}),
            ("tokenize", {"prompt": "", "x": 1}),
            ("detokenize", {"tokens": [999]}),
        ):
            assert plain.post(f"/{path}", json={"model": "bot", **body}).status_code == 400


def test_health_is_for_everybody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.gateway.access.may_call", lambda peer: False)
    with http(world.home) as plain:
        assert plain.get("/health").status_code == 200
        assert plain.get("/v1/models").status_code == plain.post("/health").status_code == 403
