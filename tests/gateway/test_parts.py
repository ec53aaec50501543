"""The parts of the gateway that need no pool: text as it comes, tokens of TCP, the table, its connection."""

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lorad.bounds import Bounds
from lorad.box.config import GatewaySettings
from lorad.box.paths import Home
from lorad.box.tokens import read_tokens
from lorad.errors import NotFound, PoolLost, SpecError
from lorad.gateway.own.app import answering
from lorad.gateway.own.text import MOST_PENDING, Detokenizer, StopCutter
from lorad.gateway.params import NEUTRAL_COMPLETION, CompletionWish, read
from lorad.gateway.table import GatewayTable
from lorad.protocol.aio import AsyncConnection
from lorad.protocol.batch import Sampling
from lorad.protocol.calls import Generate, Nothing
from tests.kit.gateway_kit import write_table
from tests.kit.pool_kit import Running, prompts, running_pool

TEXT = "né 日本 👩‍🚀 end"


@pytest.fixture(scope="module")
def letters() -> Any:
    """A tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.rest()]


def test_no_piece_of_text_has_half_a_character(letters: Any) -> None:
    tokens = letters.encode(TEXT).ids
    assert len(tokens) == len(TEXT.encode())
    told = pieces(letters, tokens)
    assert "".join(told) == TEXT and not any("\ufffd" in piece for piece in told)


def test_undecodable_tokens_are_sent_after_a_limit(letters: Any) -> None:
    tail = letters.encode("é").ids[1]  # never begins a character
    told = pieces(letters, [tail] * (3 * MOST_PENDING) + letters.encode(" end").ids)
    assert told[MOST_PENDING - 1] and "".join(told) == "\ufffd" * (3 * MOST_PENDING) + " end"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_stop_string_is_cut_across_pieces(size: int) -> None:
    text, cutter = "one, two, thr three", StopCutter(["thre", "xyz"])
    told = [cutter.add(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join(told) + cutter.rest() == "one, two, thr " and cutter.is_cut


def test_text_resembling_a_stop_string_is_sent() -> None:
    cutter = StopCutter(["END"])
    assert [cutter.add(part) for part in ("a E", "N", "d")] == ["a ", "", "ENd"]


def test_nulls_are_what_nobody_asked_for() -> None:
    wish = read(
        b'{"model": "a", "prompt": "b", "seed": null, "stop": null, "suffix": null}',
        CompletionWish,
        NEUTRAL_COMPLETION,
    )
    assert wish == CompletionWish(model="a", prompt="b")


def test_tokens_can_be_plain_or_digests(tmp_path: Path) -> None:
    path, digest = tmp_path / "tokens", hashlib.sha256(b"0123456789abcdef").digest()
    path.write_text(f"alice: [0123456789abcdef, 'sha256:{digest.hex()}']\nbob: fedcba9876543210\n")
    path.chmod(0o600)
    known = read_tokens(path)
    assert known["alice"] == [digest, digest] and len(known["bob"]) == 1


@pytest.mark.parametrize(
    "text", ["alice: short", "- alice", "alice: 'sha256:abc'", "alice: 12345678901234567890", "a: [: b"]
)
def test_refusal_of_a_token_file_quotes_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SpecError) as caught:
        read_tokens(path)
    assert "short" not in str(caught.value) and "1234" not in str(caught.value)


def test_replaced_table_is_read_again(home: Path) -> None:
    table = GatewayTable(Home(home).gateway / "table.json")
    assert table.names().aliases == {}
    for number in range(20):  # faster than the clock of the file system
        write_table(Home(home), {"bot": f"a@{number}"}, {})
        assert table.names().aliases == {"bot": f"a@{number}"}
    (Home(home).gateway / "table.json").write_text("{")
    assert table.names().aliases == {"bot": "a@19"}
    table.close()


async def test_a_connection_that_asks_for_nothing_is_closed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorad.gateway.own.app.CONNECTIONS", Bounds(head=0.05))
    monkeypatch.setattr("lorad.http.bounded.LOOK", 0.05)
    async with answering(Home(home), GatewaySettings()):
        reader, writer = await asyncio.open_unix_connection(str(Home(home).gateway_socket))
        writer.write(b"GET /v1/models HT")
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 408")
        writer.close()
        assert Home(home).gateway_socket.stat().st_mode & 0o777 == 0o600


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


async def test_abandoned_call_leaves_others_on_its_connection(running: Running) -> None:
    connection = await AsyncConnection.open(Path(running.config.socket))
    asked = Generate("base", prompts(2, 2), Sampling(max_new_tokens=40))
    left = connection.stream("serve", Generate("base", prompts(4, 4), Sampling(max_new_tokens=2000)))
    await anext(left)
    first, _, second = await asyncio.gather(
        connection.call("serve", asked), left.aclose(), connection.call("serve", asked)
    )
    assert first.samples == second.samples == 4 and connection.calls == 0
    with pytest.raises(NotFound):
        await connection.call("serve", Generate("nobody@1", prompts(), Sampling(max_new_tokens=4)))
    assert (await connection.call("hello", Nothing())).pool == "p"
    async with asyncio.timeout(30):
        while running.pool.engine._calls:  # type: ignore[attr-defined]  # noqa: ASYNC110 (it is polled)
            await asyncio.sleep(0.01)
    await connection.close()


async def test_all_calls_are_lost_with_the_connection(tmp_path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        connection = await AsyncConnection.open(tmp_path / "s")
        peer, _ = listener.accept()
        calls = [asyncio.create_task(connection.call("hello", Nothing())) for _ in range(3)]
        await asyncio.sleep(0)
        peer.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [PoolLost] * 3 and connection.is_lost
    with pytest.raises(PoolLost):
        await connection.call("hello", Nothing())
    with pytest.raises(PoolLost, match="no pool answers"):
        await AsyncConnection.open(tmp_path / "none")
