"""Forms in which other programs have rows, where they are not lorad's: what to set, or to do, for each."""

from collections.abc import Iterable
from typing import Literal

from lorad.spec.data import DataFormat

_Need = Literal["prompt"] | DataFormat
_TO_ANSWER = "data.prompt_key to {} and data.completion_key to {}"
_ALPACA = 'This is Alpaca\'s form: set data.prompt_format to "{instruction}\\n{input}"'
_FORMS: dict[_Need, dict[str, str]] = {
    "prompt": {
        "messages": "These are chats as OpenAI has them: set data.prompt_key to messages.",
        "conversations": "These are chats of ShareGPT: set data.prompt_key to conversations.",
        "instruction input": f"{_ALPACA}.",
        "instruction": "This is Alpaca's form: set data.prompt_key to instruction.",
        "question": "Set data.prompt_key to question.",
        "query": "Set data.prompt_key to query.",
        "problem": "Set data.prompt_key to problem.",
        "chosen rejected": "Texts need their prompt beside them; chats of messages may begin with it.",
    },
    "completion": {
        "chosen rejected": "These are preferences: choose algorithm dpo.",
        "preferred_output": "These are OpenAI's preferences: choose algorithm dpo.",
        "instruction input output": f"{_ALPACA} and data.completion_key to output.",
        "instruction response": f"Set {_TO_ANSWER.format('instruction', 'response')}.",
        "input output": f"Set {_TO_ANSWER.format('input', 'output')}.",
        "instruction output": f"Set {_TO_ANSWER.format('instruction', 'output')}.",
        "query response": f"This is ms-swift's form: set {_TO_ANSWER.format('query', 'response')}.",
        "question response": f"Set {_TO_ANSWER.format('question', 'response')}.",
        "question answer": f"Set {_TO_ANSWER.format('question', 'answer')}.",
        "problem solution": f"Set {_TO_ANSWER.format('problem', 'solution')}.",
        "prompt response": "Set data.completion_key to response.",
        "text": "This is a text for language modeling: cut it into prompt and completion, or into messages.",
    },
    "preference": {
        "completions labels": "These are steps for a process reward model, which lorad does not train.",
        "prompt completion label": "These are single completions: set algorithm.preference.loss to kto.",
        "messages": "These are chats: choose algorithm sft.",
        "prompt completion": "These are completions: choose algorithm sft.",
    },
    "labels": {"chosen rejected": "These are pairs: choose another algorithm.preference.loss than kto."},
}
"""Advice by what is needed, and by the columns that a row has instead."""


def advice(need: _Need, columns: Iterable[str], otherwise: str) -> str:
    """Return advice for a row with these columns that lacks what is needed; `otherwise` if there is none."""
    present = set(columns)
    texts = (text for names, text in _FORMS.get(need, {}).items() if present.issuperset(names.split()))
    return next(texts, otherwise)
