"""Answers calls of an environment's tools."""

from typing import Any

from msgspec.structs import replace as changed

from lorad.envs.protocol import Env, Message, Observation, Turn


def result_of(name: str, content: str) -> Message:
    """Return the message with which a tool answers."""
    return {"role": "tool", "name": name, "content": content}


def stepped(env: Env, turn: Turn) -> Any:
    """Have the environment answer a turn, and its malformed calls with their errors.

    A turn that has malformed calls alone does not reach the environment.
    """
    wrong = [call for call in turn.calls if call.error]
    if not wrong:
        return env.step(turn)
    errors = [result_of(call.name or "unknown", str({"error": call.error})) for call in wrong]
    good = tuple(call for call in turn.calls if not call.error)
    observed: Any = env.step(changed(turn, calls=good)) if good else Observation(errors)
    if not isinstance(observed, Observation):
        return observed
    messages = observed.messages
    if good and messages is not None and not observed.replaces:
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        messages = [*errors, *said]
    return changed(observed, messages=messages, tool_errors=observed.tool_errors + len(wrong))
