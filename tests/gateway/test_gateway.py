"""The gateway in front of a real pool, as the official client sees it."""

from pathlib import Path
from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from lorad.box.paths import Home
from lorad.gateway.own.bases import Base
from tests.kit.gateway_kit import World, entry, greedy, openai, published, running_gateway, write_table
from tests.kit.pool_kit import TINY, running_pool, until

pytest_plugins = ["tests.kit.gateway_fixtures"]


def test_models_are_aliases_and_versions(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bot", "sorter@0", "sorter@1"]
    assert client.models.retrieve("sorter@1").id == "sorter@1"
    with pytest.raises(sdk.NotFoundError, match="`nobody` does not exist") as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


def test_every_answer_names_its_version(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="bot", prompt="1 2", max_tokens=4)
    parsed = raw.parse()
    assert raw.headers["x-lorad-version"] == "sorter@0"
    assert (parsed.system_fingerprint, parsed.model) == ("lorad-sorter@0", "bot")
    stream = client.completions.with_raw_response.create(
        model="sorter@1", prompt="1 2", max_tokens=4, stream=True
    )
    assert stream.headers["x-lorad-version"] == "sorter@1"
    assert {chunk.system_fingerprint for chunk in stream.parse()} == {"lorad-sorter@1"}


def test_alias_answers_as_its_version(client: OpenAI, world: World) -> None:
    first, second = greedy(client, "sorter@0"), greedy(client, "sorter@1")
    assert first != second and greedy(client, "bot") == first
    world.point("bot", 1)
    assert greedy(client, "bot") == second


def test_seed_decides_the_completion(client: OpenAI) -> None:
    def say(seed: int) -> str:
        answer = client.completions.create(model="bot", prompt="7 3 1", seed=seed, max_tokens=12)
        return answer.choices[0].text

    assert say(1) == say(1) and len({say(seed) for seed in range(5)}) > 1


def test_completions_of_several_prompts_come_in_order(client: OpenAI) -> None:
    answer = client.completions.create(model="bot", prompt=["1 2", "7 3 1"], n=2, temperature=0, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] and texts[2] == texts[3] == greedy(client, "bot", max_tokens=6)


def test_tokens_are_a_prompt_as_their_text_is(client: OpenAI, world: World) -> None:
    ids = Base(TINY).tokenizer.encode("7 3 1", special=True)
    for prompt in (ids, [ids]):
        answer = client.completions.create(model="bot", prompt=prompt, temperature=0)
        assert answer.choices[0].text == greedy(client, "bot")
        assert answer.usage and answer.usage.prompt_tokens == len(ids)


def test_a_stream_says_what_a_whole_answer_says(client: OpenAI) -> None:
    whole = client.completions.create(model="bot", prompt="7 3 1", seed=3, n=3, max_tokens=20)
    texts, usage = ["", "", ""], None
    finishes: list[str | None] = [None, None, None]
    for chunk in client.completions.create(
        model="bot",
        prompt="7 3 1",
        seed=3,
        n=3,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason
    assert [choice.text for choice in whole.choices] == texts
    assert [choice.finish_reason for choice in whole.choices] == finishes
    assert whole.usage == usage


def test_a_chat_streams_role_text_and_end(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "bot", "messages": [{"role": "user", "content": "7 3 1"}], "seed": 5}
    whole = client.chat.completions.create(**asked, max_completion_tokens=8)
    deltas = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(**asked, max_tokens=8, stream=True)
        if chunk.choices
    ]
    assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == whole.choices[0].finish_reason
    assert "".join(delta.delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert (
        whole.usage and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    )


def test_a_chat_takes_parts_of_text(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "7 3"}, {"type": "text", "text": "1"}]
    together = [{"role": "user", "content": "7 3\n1"}]
    answers = [
        client.chat.completions.create(model="bot", messages=messages, temperature=0, max_tokens=6)  # type: ignore[arg-type]
        for messages in ([{"role": "user", "content": parts}], together)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_stop_string_is_cut_and_counted(client: OpenAI) -> None:
    whole = client.completions.create(model="bot", prompt="7 3 1", temperature=0, max_tokens=24)
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = client.completions.create(model="bot", prompt="7 3 1", temperature=0, max_tokens=24, stop=stop)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage and 0 < cut.usage.completion_tokens <= 24
    streamed = client.completions.create(
        model="bot", prompt="7 3 1", temperature=0, max_tokens=24, stop=[stop], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text


def test_logprobs_are_those_of_the_chosen_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model="bot", prompt="7 3 1", max_tokens=6, logprobs=1, seed=2)
    found = answer.choices[0].logprobs
    assert found and found.tokens and found.token_logprobs and answer.usage
    assert len(found.tokens) == len(found.token_logprobs) == answer.usage.completion_tokens
    assert all(value < 0 for value in found.token_logprobs)
    messages: Any = [{"role": "user", "content": "7 3 1"}]
    chat = client.chat.completions.create(model="bot", messages=messages, logprobs=True, max_tokens=4)
    told = chat.choices[0].logprobs
    assert told and told.content and chat.usage and len(told.content) == chat.usage.completion_tokens


def test_leaving_client_ends_only_its_generation(client: OpenAI, world: World) -> None:
    stays = client.completions.create(model="bot", prompt="7 3 1", max_tokens=300, seed=1, stream=True)
    leaves = client.completions.create(model="bot", prompt="7 3 1", max_tokens=1900, n=4, stream=True)
    next(leaves)
    leaves.close()
    text = "".join(chunk.choices[0].text for chunk in stays)
    assert (
        text == client.completions.create(model="bot", prompt="7 3 1", max_tokens=300, seed=1).choices[0].text
    )
    until(lambda: not world.running.pool.engine._calls)  # type: ignore[attr-defined]
    until(lambda: world.gateway.limits.under_way == 0)


@pytest.mark.system
def test_gateway_reconnects_to_a_returned_pool(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorad.pool.service.LAST_ANSWERS", 0.0)
    root = Home(home)
    with running_gateway(root), openai(root) as client:
        with running_pool(tmp_path) as running:
            version = published(running, tmp_path, 1)[0]
            write_table(root, {"bot": version.version}, {version.version: entry(running, tmp_path, version)})
            before = greedy(client, "bot")
            stream = client.completions.create(
                model="bot", prompt=["1"] * 32, n=128, temperature=2, max_tokens=1900, stream=True
            )
            next(stream)
        with pytest.raises(sdk.APIError, match="the pool went away"):
            list(stream)
        with pytest.raises(sdk.InternalServerError) as caught:
            greedy(client, "bot")
        assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        with running_pool(tmp_path) as running:
            assert published(running, tmp_path / "again", 1)[0].sha256 == version.sha256
            assert greedy(client, "bot") == before
