"""Reads the tool calls in what a model says, and writes them as OpenAI does."""

import json
import secrets
from typing import Any

from lorad.gateway.params import ChatWish
from lorad.rl.tools.calls import CallForm
from lorad.rl.tools.parsing import Splitter


class CallReader:
    """Reads one completion piece by piece. A call that cannot be read stays text, as in vLLM."""

    def __init__(self, wish: ChatWish, form: CallForm) -> None:
        self._splitter = Splitter(form, wish.offered())
        self._most = None if wish.parallel_tool_calls else 1

    def add(self, text: str) -> str:
        """Return the text that can be sent now."""
        return self._splitter.add(text)

    def rest(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the text that is left at the end, and the calls."""
        said = self._splitter.rest()
        unread = "".join(call.written for call in said.calls if call.arguments is None)
        calls = []
        for call in said.calls:
            if call.arguments is not None:
                arguments = json.dumps(call.arguments, ensure_ascii=False)
                function = {"name": call.name, "arguments": arguments}
                calls.append(
                    {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
                )
        return said.text + unread, calls[: self._most]
