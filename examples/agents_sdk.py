"""An agent of the OpenAI Agents SDK, as it is published, that plays the episodes of a run: `env.name:
agents_sdk.py:run`.

`python -m venv DIR; DIR/bin/pip install openai-agents==0.24.0` makes the interpreter that it runs in, and
`env.python: DIR/bin/python` names it; lorad is not installed there. Problems and tools are those of
`calculator.py`.
"""

import contextlib
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from calculator import Calculator
from openai import AsyncOpenAI, BadRequestError

set_tracing_disabled(True)  # it would be sent to OpenAI


async def run(base_url: str, task: dict[str, Any], sampling: dict[str, Any], turns: int = 6) -> float:
    """Let the agent work until it calls no tool; what it submitted last counts."""
    calculator = Calculator()
    calculator.reset(**task)
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        agent = Agent(
            name="calculator",
            tools=[function_tool(calculator.calculate), function_tool(calculator.submit)],
            model=OpenAIChatCompletionsModel(sampling["model"], client),
            model_settings=ModelSettings(
                temperature=sampling["temperature"],
                top_p=sampling["top_p"],
                max_tokens=sampling["max_tokens"],
            ),
        )
        # what was done before too many turns, a tool that there is not, or no room for a turn counts
        with contextlib.suppress(MaxTurnsExceeded, ModelBehaviorError, BadRequestError):
            await Runner.run(agent, task["prompt"], max_turns=turns)
    return calculator.get_reward()
