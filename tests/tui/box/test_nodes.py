"""The screen of nodes: who has them, and what pools wait for."""

import pytest

from tests.kit.tui_world import POOL, User, World, busy_world, detail, line, screen_text, until, using

NODES = [
    {
        "node": "h1",
        "state": "granted",
        "count": 8,
        "free": 0,
        "agents": ["qwen-1@2"],
        "bases": ["/m/Qwen3-8B"],
    },
    {"node": "h2", "state": "lost", "count": 8, "free": 8, "says": "lost: h2 exited with code 1 (qwen-1@1)"},
]


def a_world() -> World:
    world = busy_world()
    world.answers["nodes"] = NODES
    world.answers["pools"] = [{**POOL, "nodes": ["h1"]}, {"pool": "big-1", "waiting": "waits for 2 x 8 GPUs"}]
    return world


async def opened(user: User) -> None:
    await until(user, lambda: "bold" in screen_text(user))
    await user.press("N")
    await until(user, lambda: detail(user) == "nodes" and "h2" in screen_text(user))


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
async def test_nodes_say_who_has_them(size: tuple[int, int]) -> None:
    async with using(a_world(), size) as user:
        await opened(user)
        shown = screen_text(user)
        assert "2 nodes, 8 devices free" in shown and "big-1 waits for 2 x 8 GPUs" in shown
        assert "granted" in shown and "qwen-1@2" in shown and "lost" in shown
        assert line(user, "#status") == "$ lorad nodes"


async def test_enter_opens_the_pool_of_a_node() -> None:
    async with using(a_world()) as user:
        await opened(user)
        await user.press("enter")
        await until(user, lambda: detail(user) == "pool")


async def test_the_last_word_under_the_cursor_is_whole() -> None:
    word = "lost: not heard of for 35 s, as the agents of the others are, and its lease was given back"
    world = a_world()
    world.answers["nodes"] = [NODES[0], {**NODES[1], "says": word}]
    async with using(world, (80, 24)) as user:
        await opened(user)
        assert line(user, "#below") == ""
        await user.press("j")
        await until(user, lambda: line(user, "#below") == word)
        await until(user, lambda: word in " ".join(screen_text(user).split()))
