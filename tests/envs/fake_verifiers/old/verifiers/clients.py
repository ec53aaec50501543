"""A client of OpenAI's chat, which speaks as that of 0.3.1 does."""

import json
import os
import urllib.error
import urllib.request


class Client:
    opened = 0

    def __init__(self, config):
        assert os.environ[config.api_key_var]
        self.url = f"{config.api_base_url}/chat/completions"
        Client.opened += 1

    async def close(self):
        Client.opened -= 1


def resolve_client(config):
    return Client(config)


def call(client, model, messages, sampling):
    from verifiers import Error

    asked = {name: value for name, value in sampling.items() if name != "max_tokens"}
    body = {"model": model, "messages": messages, "max_completion_tokens": sampling["max_tokens"], **asked}
    request = urllib.request.Request(
        client.url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        raise Error(error.read().decode()) from None
