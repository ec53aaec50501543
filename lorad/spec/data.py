"""The section `data`: where prompts and completions come from."""

from typing import Any, Literal

import msgspec

from lorad.spec.numbers import Part, Positive

GENERATED = "reasoning_gym:"  # a source of rows that an interpreter makes
DataFormat = Literal["auto", "messages", "completion", "preference", "labels"]


class Data(Part, frozen=True):
    """Where prompts come from, and completions where those are trained on.

    Attributes:
        train: a builtin task (`sort`, `reverse`, `lookup`), a file of rows (.jsonl,
            .parquet, .csv, .json), a hub dataset, or `reasoning_gym:TASK`, whose rows reasoning-gym makes.
        eval: held-out problems, named in the same way. null is the held-out split of a builtin task
            and of reasoning_gym, and no evaluation for a file.
        args: arguments of a reasoning_gym task, such as `{size: 8192, max_word_len: 7}`; without a size there
            are 4096 rows, of which one in 16 is held out.
        python: interpreter that makes the rows of reasoning_gym; null is lorad's.
        prompts_per_step: prompts of a step; each is sampled algorithm.group_size times. With sft and dpo it
            is the number of rows of a step.
        format: what a row of sft or dpo is. messages is a chat, of which every assistant turn is trained;
            completion is a prompt and a completion, each as text or as messages. Of dpo: preference is a
            chosen and a rejected completion, with a prompt or as whole chats, whose common turns are the
            prompt then; labels is a prompt, a completion, and true or false. auto looks at the first row.
        prompt_key: column that holds the prompt; `a.b` is the key b of the column a, here and below.
        prompt_format: the prompt as text with columns in braces, as in `Q: {question}` or `{a.b}`; null takes
            the column of prompt_key.
        completion_key: column that holds the completion.
        messages_key: column that holds the chat.
        chosen_key: column that holds the chosen completion.
        rejected_key: column that holds the rejected completion.
        label_key: column that says whether a completion is desired.
        answer_key: column of the answer; by default also where rows for verl and SkyRL have it.
        max_prompt_tokens: longest prompt, in tokens; the default gives way where the model has less room.
        max_sample_tokens: longest sample of sft and dpo, prompt and completion together, in tokens; the
            default gives way where the model has less room.
        too_long: drop or truncate longer prompts; with sft and dpo, longer samples.
        chat_template: auto uses the tokenizer's chat template where it has one.
        chat_template_kwargs: further variables of the chat template, such as `{enable_thinking: false}`.
        system: system prompt of chats that do not bring their own.
        shuffle: shuffle the rows.
    """

    train: str = "sort"
    eval: str | None = None
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    python: str | None = None
    prompts_per_step: Positive = 16
    format: DataFormat = "auto"
    prompt_key: str = "prompt"
    prompt_format: str | None = None
    completion_key: str = "completion"
    messages_key: str = "messages"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    label_key: str = "label"
    answer_key: str = "answer"
    max_prompt_tokens: Positive = 512
    max_sample_tokens: Positive = 2048
    too_long: Literal["drop", "truncate"] = "drop"
    chat_template: Literal["auto", "never"] = "auto"
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    system: str | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        if (self.args or self.python) and not any(
            (source or "").startswith(GENERATED) for source in (self.train, self.eval)
        ):
            raise ValueError("args and python are for reasoning_gym:TASK, and neither train nor eval is one")
        if self.chat_template == "never" and (self.chat_template_kwargs or self.system):
            raise ValueError(
                "system and chat_template_kwargs need the chat template, and chat_template is never"
            )
