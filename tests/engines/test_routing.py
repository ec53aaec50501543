"""Which of several servers takes a sample."""

from collections import Counter

import numpy as np

from lorad.engines.remote.fleet import SURPLUS, pick


def prompts(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(0, 100, 20).astype(np.int32) for i in range(count)]


def test_equal_prompts_go_to_the_same_server() -> None:
    """Idle servers share different prompts evenly."""
    first = [pick(prompt, [(0, 0), (1, 0), (2, 0)]) for prompt in prompts(300)]
    assert first == [pick(prompt.copy(), [(2, 0), (1, 0), (0, 0)]) for prompt in prompts(300)]
    assert min(Counter(first).values()) > 70


def test_lost_server_moves_only_its_own_prompts() -> None:
    all_three = [pick(prompt, [(0, 0), (1, 0), (2, 0)]) for prompt in prompts(200)]
    without_1 = [pick(prompt, [(0, 0), (2, 0)]) for prompt in prompts(200)]
    assert all(now == before for now, before in zip(without_1, all_three, strict=True) if before != 1)


def test_repeated_prompt_is_spread_over_servers() -> None:
    loads = {0: 0, 1: 0, 2: 0, 3: 0}
    for _ in range(400):
        loads[pick(prompts(1)[0], list(loads.items()))] += 1
    assert max(loads.values()) <= SURPLUS * 100 + 1
    assert min(loads.values()) > 0
