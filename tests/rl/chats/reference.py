"""What transformers makes of the rows of chats: the reference that lorad's are compared with."""

import json
from copy import deepcopy
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

GOLDENS = Path(__file__).parents[2] / "data" / "chat_goldens"
FAMILIES = ("qwen3", "llama3", "hermes", "mistral", "gpt_oss", "parts", "deepseek")
KEYS = ("weight", "loss", "train", "trainable", "training", "loss_mask")
Sample = tuple[list[int], list[int]]  # token ids, and a mask of what is trained


@cache
def golden(family: str) -> PreTrainedTokenizerFast:
    """transformers' tokenizer of a family, whose template marks what the assistant says."""
    made = PreTrainedTokenizerFast(tokenizer_file=str(GOLDENS / "tokenizer.json"), bos_token="<s>")
    made.eos_token, made.chat_template = "</s>", (GOLDENS / f"{family}.jinja").read_text()
    return made


def normal(row: dict[str, Any], family: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return messages and variables as transformers wants them: what docs/data.md says that lorad reads."""
    messages = []
    for message in deepcopy(row.get("messages") or row["prompt"]):
        one = {key: value for key, value in message.items() if value is not None and key not in KEYS}
        if isinstance(one.get("content"), list) and family != "parts":
            one["content"] = "\n".join(part["text"] for part in one["content"])
        if not one.get("tool_calls", True):
            del one["tool_calls"]
        for call in one.get("tool_calls", ()):
            if isinstance(text := call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(text)
            if family == "deepseek":
                text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                call["function"]["arguments"], one["content"] = text, one.get("content") or ""
        messages.append(one)
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return messages, {**(row.get("chat_template_kwargs") or {}), **({"tools": tools} if tools else {})}


def prompt_of(row: dict[str, Any], family: str) -> list[int]:
    """Return the tokens of a prompt. Raises what transformers does."""
    messages, variables = normal(row, family)
    goes_on = messages[-1]["role"] == "assistant"
    how: dict[str, Any] = {"continue_final_message": goes_on, "add_generation_prompt": not goes_on}
    found: list[int] = golden(family).apply_chat_template(messages, return_dict=False, **how, **variables)
    return found


def samples_of(row: dict[str, Any], family: str) -> list[Sample] | None:
    """Return the samples of a row; None where a turn does not follow what is before it.

    Raises what transformers does.
    """
    messages, variables = normal(row, family)
    says = [not any(m.get(key) in (0, False) for key in KEYS) for m in row["messages"]]
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    apply: Any = golden(family).apply_chat_template

    def text(end: int, *, generate: bool) -> str:
        made = str(apply(messages[:end], tokenize=False, add_generation_prompt=generate, **variables))
        opens = generate and family == "deepseek"  # thoughts, which it leaves out of the turn
        return made.removesuffix("<think>\n") if opens else made

    def masked(end: int, turns: list[int]) -> Sample:
        how = {"return_dict": True, "return_assistant_tokens_mask": True, **variables}
        made = apply(messages[:end], **how)
        prompts = [
            golden(family).encode(text(place, generate=True), add_special_tokens=False) for place in turns
        ]
        begins = {answers.index(place): len(ids) for place, ids in zip(turns, prompts, strict=True)}
        mask = only(made["assistant_masks"], begins)
        return made["input_ids"][: len(mask)], mask

    def apart(place: int) -> Sample | None:
        mark = text(place, generate=True).removeprefix(text(place, generate=False))
        answered = max((answer + 1 for answer in answers if answer < place), default=0)
        known, after = text(answered, generate=False) if answered else "", text(place + 1, generate=False)
        is_found = mark.strip() and after.startswith(known) and after[len(known) :].count(mark) == 1
        if not is_found and not (family == "mistral" and messages[0]["role"] == "system"):
            return None
        made = apply(messages[: place + 1], return_dict=True, return_assistant_tokens_mask=True, **variables)
        mask = only(made["assistant_masks"], {answers.index(place): 0})
        prompt = apply(messages[:place], add_generation_prompt=True, return_dict=False, **variables)
        turn = slice(mask.index(1), len(mask))
        return prompt + made["input_ids"][turn], [0] * len(prompt) + mask[turn]

    trained = [place for place in answers if says[place]]
    follows = [text(place + 1, generate=False).startswith(text(place, generate=True)) for place in trained]
    if not all(follows):
        samples = [
            masked(place + 1, [place]) if is_behind else apart(place)
            for place, is_behind in zip(trained, follows, strict=True)
        ]
        return None if None in samples else together([sample for sample in samples if sample])
    pairs = pairwise(trained)
    if all(
        text(after, generate=True).startswith(text(before + 1, generate=False)) for before, after in pairs
    ):
        return [masked(trained[-1] + 1, trained)]
    return [masked(place + 1, [place]) for place in trained]


def together(samples: list[Sample]) -> list[Sample]:
    """Return one sample for turns each of which begins with the one before; else the samples."""
    if any(after[: len(before)] != before for (before, _), (after, _) in pairwise(samples)):
        return samples
    masks = zip_longest(*(mask for _, mask in samples), fillvalue=0)
    return [(samples[-1][0], [max(marks) for marks in masks])]


def only(mask: list[int], begins: dict[int, int]) -> list[int]:
    """Return a mask of some of its spans alone, from where each begins behind its prompt, up to the last."""
    starts = [place for place, on in enumerate(mask) if on and (place == 0 or not mask[place - 1])]
    spans = [sum(start <= place for start in starts) - 1 for place in range(len(mask))]
    kept = [
        int(on and place >= begins.get(span, len(mask)))
        for place, (on, span) in enumerate(zip(mask, spans, strict=True))
    ]
    return kept[: len(kept) - kept[::-1].index(1)] if any(kept) else []
