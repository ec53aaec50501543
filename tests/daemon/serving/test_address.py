"""What `swap` and `serve` print of where a model answers."""

import pytest

from lorad.cli.output import tell_address
from lorad.records.versions import ServedModel

URL = "http://127.0.0.1:8123/v1"
KEY = "/home/me/it's here/gateway/key"


def lines(capsys: pytest.CaptureFixture[str], served: ServedModel) -> list[str]:
    tell_address(served, "bot")
    return capsys.readouterr().err.splitlines()


def test_chat_models_are_asked_in_chats(capsys: pytest.CaptureFixture[str]) -> None:
    told = lines(capsys, ServedModel("p", [], "/g.sock", URL, KEY, chat=True))
    assert "http://lorad/v1/chat/completions" in told[1] and '"role": "user"' in told[1]
    assert told[2:4] == [f"Base URL: {URL}", f"API key: in {KEY}"]
    assert told[6] == f'client = OpenAI(base_url="{URL}", api_key=open("{KEY}").read())'
    assert told[7].startswith('answer = client.chat.completions.create(model="bot", messages=[{"role": ')
    compile("\n".join(told[5:]), "pasted", "exec")


def test_other_models_are_asked_to_complete(capsys: pytest.CaptureFixture[str]) -> None:
    told = lines(capsys, ServedModel("p", [], "/g.sock", URL, KEY))
    assert "http://lorad/v1/completions" in told[1]
    assert told[7] == 'answer = client.completions.create(model="bot", prompt="Hello", max_tokens=32)'
    assert told[8] == "print(answer.choices[0].text)"


def test_tokens_of_a_file_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    told = lines(capsys, ServedModel("p", [], "/g.sock", URL))
    assert told[3] == "API key: a token of gateway.tokens" and 'api_key="A TOKEN"' in told[6]


def test_without_a_port_it_says_what_opens_one(capsys: pytest.CaptureFixture[str]) -> None:
    told = lines(capsys, ServedModel("p", [], "/g.sock"))
    assert "`gateway: {port, tokens}` in config.yaml" in told[2] and len(told) == 3
