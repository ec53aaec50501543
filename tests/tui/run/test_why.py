"""The tab that says why a run does not learn."""

from lorad.tui.run.screen import RunScreen
from tests.kit.tui_world import World, a_run, a_step, line, screen_text, until, using


async def test_findings_are_shown_with_what_to_try() -> None:
    world = World(a_run("sorter", spec={}))
    world.steps = [a_step(number, 0.0) for number in (1, 2, 3)]
    for step in world.steps:
        step["metrics"] |= {"truncated": 1.0, "empty": 1.0}
    world.answers |= {"versions": [], "runs/sorter/samples": [], "runs/sorter/evals": []}
    async with using(world, (80, 24)) as user:
        await until(user, lambda: "sorter" in screen_text(user))
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        await user.press("8")
        await until(user, lambda: "cause  empty" in screen_text(user))
        shown = screen_text(user)
        assert "100% of the first completions have no text." in shown
        assert shown.index("cause  empty") < shown.index("cause  cut-off")
        assert "try rollout.max_new_tokens=" in shown
        assert line(user, "#why-head").startswith("Its reward went from 0 to 0 in 3 steps")
