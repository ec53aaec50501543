"""Forms in which other programs have rows, where they are not lorad's: what to set, or to do, for each."""

from collections.abc import Iterable
from typing import Literal

from lorad.spec.data import DataFormat

_Need = Literal["prompt"] | DataFormat
_TO_ANSWER = "data.prompt_key to {} and data.completion_key to {}"
_FORMS: tuple[tuple[_Need, str, str], ...] = (
    ("prompt", "messages", "These are chats as OpenAI has them: set data.prompt_key to messages."),
    ("prompt", "conversations", "These are chats of ShareGPT: set data.prompt_key to conversations."),
    (
        "prompt",
        "instruction input",
        'This is Alpaca\'s form: set data.prompt_format to "{instruction}\\n{input}".',
    ),
    ("prompt", "instruction", "This is Alpaca's form: set data.prompt_key to instruction."),
    ("prompt", "question", "Set data.prompt_key to question."),
    ("prompt", "query", "Set data.prompt_key to query."),
    ("prompt", "problem", "Set data.prompt_key to problem."),
    (
        "prompt",
        "chosen rejected",
        "Texts need their prompt beside them; chats of messages may begin with it.",
    ),
    ("completion", "chosen rejected", "These are preferences: choose algorithm dpo."),
    ("completion", "preferred_output", "These are OpenAI's preferences: choose algorithm dpo."),
    (
        "completion",
        "instruction input output",
        "This is Alpaca's form: set data.prompt_format to "
        '"{instruction}\\n{input}" and data.completion_key to output.',
    ),
    ("completion", "instruction response", f"Set {_TO_ANSWER.format('instruction', 'response')}."),
    ("completion", "input output", f"Set {_TO_ANSWER.format('input', 'output')}."),
    ("completion", "instruction output", f"Set {_TO_ANSWER.format('instruction', 'output')}."),
    (
        "completion",
        "query response",
        f"This is ms-swift's form: set {_TO_ANSWER.format('query', 'response')}.",
    ),
    ("completion", "question response", f"Set {_TO_ANSWER.format('question', 'response')}."),
    ("completion", "question answer", f"Set {_TO_ANSWER.format('question', 'answer')}."),
    ("completion", "problem solution", f"Set {_TO_ANSWER.format('problem', 'solution')}."),
    ("completion", "prompt response", "Set data.completion_key to response."),
    (
        "completion",
        "text",
        "This is a text for language modeling: cut it into prompt and completion, or into messages.",
    ),
    (
        "preference",
        "completions labels",
        "These are steps for a process reward model, which lorad does not train.",
    ),
    (
        "preference",
        "prompt completion label",
        "These are single completions: set algorithm.preference.loss to kto.",
    ),
    ("preference", "messages", "These are chats: choose algorithm sft."),
    ("preference", "prompt completion", "These are completions: choose algorithm sft."),
    ("labels", "chosen rejected", "These are pairs: choose another algorithm.preference.loss than kto."),
)
"""What is needed, the columns that a row has instead, and advice."""


def advice(need: _Need, columns: Iterable[str], otherwise: str) -> str:
    """Return what to do about a row that has these columns and not what is needed; `otherwise` where nothing
    is known of that.
    """
    present = set(columns)
    texts = (text for needed, names, text in _FORMS if needed == need and present.issuperset(names.split()))
    return next(texts, otherwise)
