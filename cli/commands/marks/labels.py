"""The commands tag, note and rename: words of the user's on a run, and its name."""

from typing import Annotated

import typer

from lorad.cli import output
from lorad.cli.options import AsJson, Run
from lorad.client import launch
from lorad.client.client import Client
from lorad.records.runs import Run as RunShape

tag_app = typer.Typer(add_completion=False)


# A word that begins with a dash is one to take off, and no option.
@tag_app.command(context_settings={"ignore_unknown_options": True})
def tag(
    run: Run,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TAG|-TAG]…", help="Tags to add; with a dash before it, one to take off."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add tags to a run and take tags off it: `lorad tag sorter good paper -draft`. Without tags, show them.

    `tags:` in a spec gives a run tags from the beginning; `lorad list --tags` shows them.
    """
    labelled: RunShape
    if words:
        removed = [word[1:] for word in words if word.startswith("-")]
        added = [word.removeprefix("+") for word in words if not word.startswith("-")]
        labelled = launch.connected().label(run, add=added, remove=removed)
    else:
        (labelled,) = Client().named([run]) or [Client().show(run)]
    if as_json:
        output.print_json(labelled)
    else:
        output.report(" ".join(labelled.tags))


def note(
    run: Run,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The note; '' removes it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a note on a run, in place of the one before: `lorad note sorter "the best so far"`. Without text,
    show it.
    """
    if text is None:
        shown = Client().show(run)
        if as_json:
            output.print_json({"name": shown.name, "note": shown.note})
        else:
            output.report(shown.note)
        return
    changed = launch.connected().label(run, note=text)
    output.note_or_json(changed, f"{run}: {changed.note or 'no note'}", as_json=as_json)


def rename(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that it gets.")],
    as_json: AsJson = False,
) -> None:
    """Give a run another name, with its directory, versions, events and bill: `lorad rename sorter best`.

    It has to be over or queued, and nothing may serve or pin its versions. Loggers know it by the name that
    it began with. No later run can have the name of another run's versions again.
    """
    changed = launch.connected().rename(run, name)
    output.note_or_json(changed, f"{run} is {changed.name} now.", as_json=as_json)
