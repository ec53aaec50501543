"""The commands adapters, export, pin and unpin: the versions of adapters."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec.structs import replace

from lorad import text
from lorad.cli import candidates, many, output, table
from lorad.cli.options import AsJson, Versions, Yes
from lorad.client.client import Client
from lorad.errors import NotFound, SpecError
from lorad.files import expanded
from lorad.records.versions import Version
from lorad.selection import Selection, is_glob

_VERSIONS = table.columns(
    "version, step 3, sha256 6, rank 7, alpha 8, held 2, loaded 4, attested 1, age 5, path 9 whole"
)
_SHOWN = 3  # results of a version


def adapters(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Only this run's.", autocompletion=candidates.runs)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List versions, oldest first, with their files, hashes, users and attestation."""
    versions = Client().adapters(run)
    results = {
        v.sha256: ", ".join(
            f"{result.data} {output.number(next(iter(result.metrics.values()), None)) or '-'}"
            for result in v.results[-_SHOWN:]
        )
        for v in versions
    }
    has_results = any(results.values())
    rows = [
        (
            f"{v.run}@{v.version}",
            v.step,
            v.sha256[:12],
            v.rank,
            f"{v.alpha:g}",
            ", ".join(["pinned"] * v.pinned + v.aliases),
            "yes" if v.loaded else "",
            v.attested,
            *([results[v.sha256]] if has_results else []),
            output.age(v.created_at),
            v.path or "(files pruned)",
        )
        for v in versions
    ]
    evals = [table.Column("evals", 2)] if has_results else []
    columns = (*_VERSIONS[:-2], *evals, *_VERSIONS[-2:])
    output.table_or_json(versions, columns, rows, empty="No versions yet.", as_json=as_json)


def export(
    version: Annotated[str, typer.Argument(metavar="RUN@N", autocompletion=candidates.versions)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Write a whole model: the base with the version in its weights.")
    ] = False,
    form: Annotated[
        Literal["peft", "peft5"],
        typer.Option("--format", help="peft5: experts of a mixture in the form of PEFT on transformers 5."),
    ] = "peft",
    names: Annotated[
        Literal["file", "class"],
        typer.Option(help="class: of linears, as transformers' class of the language model alone has them."),
    ] = "file",
    tokenizer: Annotated[bool, typer.Option(help="Put the base's tokenizer beside an adapter.")] = True,
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Upload it to this repository of the hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make that repository private.")] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="File with a token for the hub, else its own login.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy a version, verified, into a directory that PEFT, SGLang and vLLM load, with a model card.

    --merge reads what it wrote again and compares each number with base and adapter. --push uploads the
    directory as one commit; HF_ENDPOINT names another hub.
    """
    from lorad.cli import exports, hub

    if push is None and (private or token_file):
        raise SpecError("--private and --token-file belong to --push", hint="Add --push ORG/NAME.")
    chosen = {"--merge": merge, f"--format {form}": form != "peft", f"--names {names}": names != "file"}
    if len(flags := [flag for flag, is_set in chosen.items() if is_set]) > 1:
        raise SpecError(f"{flags[1]} is not for {flags[0]}", hint="Leave out one of them.")
    token = hub.read_token(token_file)
    client = Client()
    target = expanded(directory).absolute()
    if merge:
        answer, merged = exports.merge(client, version, target)
        about = f", merged into {merged.changed} weights of its base, {text.size(merged.bytes)}"
    else:
        about = ""
        if form == "peft5":
            answer = exports.write_peft5(client, version, target)
        elif names == "class":
            answer = exports.write_class_names(client, version, target)
        else:
            answer = client.export(version, str(target))
        exports.add_beside(
            target, answer, client.show(answer.version.rpartition("@")[0]), tokenizer=tokenizer
        )
    if push is not None:
        url = hub.push(target, push, private=private, token=token, message=f"{answer.version} by lorad")
        answer = replace(answer, url=url)
    if as_json:
        output.print_json(answer)
        return
    output.note(f"{answer.version} is in {answer.path} (sha256 {answer.sha256}){about}.")
    if answer.url:
        output.note(f"Uploaded: {answer.url}")


def pin(versions: Versions, yes: Yes = False, as_json: AsJson = False) -> None:
    """Keep the files of versions, and keep them loaded while the pool of their base is up.

    Of several, named or found by globs, it shows a list and asks first: `lorad pin 'sweep-*@best'`.
    """
    client = Client()
    verb = many.BulkVerb("pin", client.pin, lambda row: f"{row.run}@{row.version} is pinned.", "Pin {}?")
    _change(client, verb, versions, yes=yes, as_json=as_json, fits=lambda version: not version.pinned)


def unpin(versions: Versions, yes: Yes = False, as_json: AsJson = False) -> None:
    """Remove pins; an alias keeps its version without one.

    Of several, named or found by globs, it shows a list and asks first: `lorad unpin 'RUN@*'`.
    """
    client = Client()
    verb = many.BulkVerb("unpin", client.unpin, _unpinned, "Unpin {}?")
    _change(client, verb, versions, yes=yes, as_json=as_json, fits=lambda version: version.pinned)


def _unpinned(row: Version) -> str:
    served = f", {', '.join(row.aliases)} still serves it" if row.aliases else ""
    return f"{row.run}@{row.version} is no longer pinned{served}."


def _change(
    client: Client,
    verb: many.BulkVerb,
    versions: Sequence[str],
    *,
    yes: bool,
    as_json: bool,
    fits: Callable[[Version], bool],
) -> None:
    """Change one version that was named, or ask about several and change each."""
    if len(versions) == 1 and not is_glob(versions[0]):
        row = verb.does(versions[0])
        output.note_or_json(row, verb.says(row), as_json=as_json)
        return
    names: list[str] = []
    for typed in versions:  # with globs it means runs before the `@`, and numbers after it
        name, at, number = typed.partition("@")
        runs = [run.name for run in client.select(Selection(names=[name]))] if is_glob(name) else [name]
        if not runs:
            raise NotFound(f"no run is named like {name}", hint="`lorad list --all` shows every run.")
        if not is_glob(number):
            names += [f"{run}{at}{number}" for run in runs]
            continue
        all_versions = [version for run in runs for version in client.adapters(run)]
        alike = [version for version in all_versions if fnmatchcase(str(version.version), number)]
        if not alike:
            raise NotFound(f"no version is named like {typed}", hint="`lorad adapters` shows what there is.")
        names += [f"{v.run}@{v.version}" for v in alike if v.path and fits(v)]
    names = [*dict.fromkeys(names)]
    if not names:
        output.note(f"There is nothing to {verb.name}.")
    else:
        many.ask(verb, text.counted(len(names), "version"), [[n] for n in names], yes=yes)
    many.conclude(verb, many.do_each(verb, names, quiet=as_json), as_json=as_json)
