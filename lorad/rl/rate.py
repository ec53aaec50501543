"""The learning rate that fits a model and an algorithm: what `trainer.lr` is where it is not given. Pure.

LoRA takes about ten times the rate of full fine-tuning, nearly whatever its rank (Schulman et al., "LoRA
Without Regret", 2025). The exponents of the hidden size are those of `get_lr` in Tinker's cookbook
(hyperparam_utils.py), which were fitted on Llama and Qwen from 1B to 70B, on supervised fine-tuning.
Reinforcement learning takes an eighth, which is in the middle of what published runs over LoRA have (the
table of docs/algorithms.md). Bases narrower than all of theirs keep the whole rate: SmolLM2-135M learns with
it in a few steps, and not with an eighth. Preference losses take a fiftieth: Tinker's recipe for DPO has
1e-5. A critic is fitted to numbers, as SFT is to tokens, and takes SFT's rate: in verl it has ten times the
policy's.
"""

from lorad.protocol.preflight import Rate
from lorad.spec.model import Spec

_BASE = 10 * 5e-5
_WIDTH = 2000
_EXPONENTS = {"qwen": 0.0775, "llama": 0.781}  # by how the model_type of config.json begins
_NARROWEST = 1024  # hidden size; the formula was not fitted below
_UNKNOWN = 8192  # hidden size that is assumed where config.json names none
_SMALLEST = 896  # hidden size of the smallest base with a published recipe of reinforcement learning
_SHARES = {"rl": 1 / 8, "preference": 1 / 50}  # of the rate of sft
_PUBLISHED = (1e-6, 1.7e-4)  # the least and the highest rate of the recipes in docs/algorithms.md
_TINY = 1e-3
_TINY_PREFERENCES = 1e-4  # found on builtin:tiny, where 1e-3 ruins what DPO generates
_FAR = 10
_HIGH_RANK = 64
_HIGHEST_RANK = 128  # ranks that collapsed in some and in all batches of the paper
_OF_HIGH_RANKS = 2e-5  # the highest rate of a recipe with one
_PAPER = "https://openreview.net/forum?id=XGZHI14m8P"


def fitting_rate(spec: Spec, model_type: str, hidden_size: int) -> Rate:
    """Choose the rate for a model by what its config.json has; "" and 0 where it has no such key."""
    kind = spec.algorithm.kind
    has_critic = spec.algorithm.has_critic
    if spec.model.path.startswith("builtin:"):
        lr = _TINY_PREFERENCES if kind == "preference" else _TINY
        return Rate(lr, f"{spec.algorithm.name} on {spec.model.path}", lr if has_critic else None)
    width = max(hidden_size or _UNKNOWN, _NARROWEST)
    family = next((name for name in _EXPONENTS if model_type.lower().startswith(name)), None)
    exponents = _EXPONENTS.values() if family is None else (_EXPONENTS[family],)
    rate = min(_BASE * (_WIDTH / width) ** exponent for exponent in exponents)
    is_unpublished = kind == "rl" and 0 < hidden_size < _SMALLEST
    share = 1.0 if is_unpublished else _SHARES.get(kind, 1.0)
    model = f"{model_type or 'a model'} of hidden size {hidden_size or 'unknown'}"
    as_which = "" if family else ", the lower of what Llama and Qwen have"
    critic = float(f"{rate:.3g}") if has_critic else None
    return Rate(float(f"{rate * share:.3g}"), f"{spec.algorithm.name} on {model}{as_which}", critic)


def rate_doubts(spec: Spec, rate: Rate) -> list[str]:
    """Return warnings of a learning rate that is far from the fitting one, and of a rank at which GRPO was
    seen to collapse.

    A rate is far off where it is ten times off the fitting one, and no published run of reinforcement
    learning has it; 0 is meant to be 0. A rank may be high where the rate is as low as in the recipes with
    such ranks. Distillation has a signal for each token, and Tinker's recipe for it has rank 128.
    """
    doubts = []
    lr = spec.trainer.lr
    low = rate.lr / _FAR
    high = rate.lr * _FAR
    published = ""
    if spec.algorithm.kind == "rl" and not spec.model.path.startswith("builtin:"):
        low = min(low, _PUBLISHED[0])
        high = max(high, _PUBLISHED[1])
        published = "; published runs over LoRA have {:g} to {:g}".format(*_PUBLISHED)
    if lr and not low <= lr <= high:
        times, side = (lr / rate.lr, "above") if lr > rate.lr else (rate.lr / lr, "below")
        doubts.append(
            f"trainer.lr: {lr:g} is {times:.0f} times {side} {rate.lr:g}, which fits {rate.why}; without "
            f"trainer.lr that is taken{published}"
        )
    rank = spec.lora.rank
    is_sparse = spec.algorithm.kind == "rl" and spec.algorithm.name != "distill"
    if is_sparse and rank >= _HIGH_RANK and (lr or rate.lr) > _OF_HIGH_RANKS:
        if rank < _HIGHEST_RANK:
            seen = (
                "may collapse: with GRPO rank 64 fell from 73 % to 9 % and 6 % as batches grew from 64 to 256"
            )
        else:
            seen = "will probably collapse: with GRPO ranks 128 and 256 stayed near their floor at each batch"
        doubts.append(
            f"lora.rank: {rank} {seen}, and rank 8 did not ({_PAPER}); recipes with {_HIGH_RANK} or more "
            f"have a trainer.lr of at most {_OF_HIGH_RANKS:g}"
        )
    return doubts
