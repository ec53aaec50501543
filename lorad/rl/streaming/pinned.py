"""Which commit of a hub dataset a run streams: the newest when it begins, and the same after every resume."""

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import structs

from lorad.rl.sources import HUB_NAME, SUFFIXES
from lorad.rl.tasks import TASKS
from lorad.spec.data import GENERATED, single
from lorad.spec.model import Spec


def pinned(spec: Spec, before: Mapping[str, str], newest: Callable[[str], str | None]) -> Spec:
    """Return the spec with the commit of each hub dataset that is streamed.

    before: The commits of the attempt before, by the dataset's name.
    newest: Asks for a commit that `before` lacks.
    """
    if not spec.data.streaming:
        return spec
    commit_of = dict(before)

    def with_commit(source: str) -> str:
        named = None if _is_local(source) else HUB_NAME.fullmatch(source)
        if named is None or named["revision"]:
            return source
        name = named["name"]
        commit = commit_of[name] = commit_of.get(name) or newest(name) or ""
        parts = f":{named['parts']}" if named["parts"] else ""
        return f"{name}@{commit}{parts}" if commit else source

    data = structs.replace(spec.data, train=with_commit(single(spec.data.train)))
    if source := single(data.eval):
        data = structs.replace(data, eval=with_commit(source))
    sets = {name: structs.replace(s, data=with_commit(s.data)) for name, s in spec.eval.sets.items()}
    return structs.replace(spec, data=data, eval=structs.replace(spec.eval, sets=sets))


def commits(spec: Spec) -> dict[str, str]:
    """Return the commit of each hub dataset that is streamed, by the dataset's name."""
    if not spec.data.streaming:
        return {}
    data = spec.data
    sources = [
        single(data.train),
        single(data.eval),
        *(eval_set.data for eval_set in spec.eval.sets.values()),
    ]
    named = [HUB_NAME.fullmatch(source) for source in sources if not _is_local(source)]
    return {each["name"]: each["revision"] for each in named if each is not None and each["revision"]}


def _is_local(source: str) -> bool:
    return source in TASKS or source.startswith(GENERATED) or Path(source).suffix.lower() in SUFFIXES
