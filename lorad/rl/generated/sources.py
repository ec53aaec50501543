"""Sources of rows that cannot be what they are named for: beside an environment, or with one of their own."""

from collections.abc import Iterator

from lorad.errors import SpecError
from lorad.spec.data import SIDES, names_of, sources_with_own
from lorad.spec.env import VERIFIERS
from lorad.spec.model import Spec


def refuse_rows(spec: Spec) -> Iterator[SpecError]:
    """Yield errors of rows beside those of an environment of verifiers, and of its sandbox."""
    own = spec.env.name if spec.env.package else None
    sources = {"data.train": spec.data.train, "data.eval": spec.data.eval}
    sources |= {f"eval.sets.{name}.data": problems.data for name, problems in spec.eval.sets.items()}
    for key, name, named in (
        (key, name, names) for key, names in sources.items() for name in names_of(names)
    ):
        if name != own and (own or (name.startswith(VERIFIERS) and name not in sources_with_own(named))):
            hint = "An environment of verifiers has rows of its own: name it in env.name, and no data."
            yield SpecError(f"env.name plays {own}, and not the rows of {name}", key=key, hint=hint)
    if own and spec.env.sandbox != "none":
        problem = f"{own} wants files of its user and the network, which a sandbox has none of"
        yield SpecError(problem, key="env.sandbox", hint="Leave it out.")


def refuse_judges(spec: Spec) -> Iterator[SpecError]:
    """Yield errors of sources with an environment or a reward of their own."""
    for side in SIDES:
        packages = set[str]()
        for name, own in sources_with_own(getattr(spec.data, side)).items():
            key = f"data.{side}"
            env = own.played
            if spec.algorithm.kind != "rl":
                hint = "Leave env and reward out, or choose an algorithm that samples, such as grpo."
                problem = f"{name}: {spec.algorithm.name} trains on the completions of the data"
                yield SpecError(f"{problem}, and judges none", key=key, hint=hint)
            if own.env is not None and env.name is None:
                hint = "Name its environment: env: {name: …}."
                yield SpecError(
                    f"{name}: nothing is played in an environment without a name", key=key, hint=hint
                )
            if env.package and name != env.name:
                problem = f"{name}: {env.name} has rows of its own, and plays no others"
                yield SpecError(problem, key=key, hint=f"Name {env.name} in the place of {name}.")
            elif env.package and env.package in packages:
                problem = f"{name}: the environment {env.package} brings its own rows twice"
                yield SpecError(problem, key=key, hint="Name it once; a weight says how much of it there is.")
            if env.package and env.sandbox != "none":
                problem = f"{name} wants files of its user and the network, which a sandbox has none of"
                yield SpecError(problem, key=key, hint="Leave env.sandbox out.")
            packages.add(env.package)
