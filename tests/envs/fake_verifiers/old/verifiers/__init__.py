"""A stand-in for verifiers 0.1 to 0.3: what of it the adapter asks for, in the shapes of 0.3.1."""

import asyncio
import importlib

from verifiers.clients import Client, call


class Error(Exception):
    pass


class EmptyModelResponseError(Error):
    pass


class SingleTurnEnv:
    """Plays until `answer_to` says None; the rewards are of the last text."""

    message_type = "chat"
    requires_group_rollouts = False
    tool_defs = None
    max_turns = 1

    def __init__(self, dataset, eval_dataset=None, **settings):
        self.dataset, self.eval_dataset = dataset, eval_dataset
        vars(self).update(settings)

    def get_dataset(self):
        return self.dataset

    def get_eval_dataset(self):
        return self.eval_dataset or self.dataset

    async def answer_to(self, row, text, turn):
        return None

    async def run_rollout(self, row, client, model, sampling):
        assert isinstance(client, Client)
        messages, turns, out = [*row["prompt"]], 0, {"error": None, "is_truncated": False}
        stop = None
        while stop is None:
            try:
                text = await asyncio.to_thread(call, client, model, messages, sampling)
                if not text:
                    raise EmptyModelResponseError("nothing was said")
            except Error as error:
                too_long = "maximum context length is" in str(error)
                stop = "prompt_too_long" if too_long else "has_error"
                if not too_long:
                    kind = type(error).__name__
                    out["error"] = {"error": kind, "message": str(error), "error_chain_str": kind,
                                    "error_chain_repr": repr(error)}  # fmt: skip
                break
            turns += 1
            answer = await self.answer_to(row, text, turns)
            stop = "done" if answer is None else "max_turns_reached" if turns >= self.max_turns > 0 else None
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": answer or ""}]
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        metrics = {
            "right": float(row["answer"] in said),
            "num_turns": turns,
            "of two words": turns,
            "odd": "x",
        }
        return {**out, "reward": metrics["right"], "metrics": metrics, "stop_condition": stop}


class MultiTurnEnv(SingleTurnEnv):
    max_turns = -1


class SandboxEnv(SingleTurnEnv):
    pass


def load_environment(env_id, **args):
    return importlib.import_module(env_id.replace("-", "_")).load_environment(**args)
