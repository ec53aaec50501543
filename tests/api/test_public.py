"""What is public stays: names, arguments, types and fields, compared with a frozen file.

`python -m tests.api.test_public` writes the file again, after a change that is meant.
"""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lorad
from lorad.api import twins
from tests.kit.world import REPOSITORY
from tests.test_house import loaded_after

FROZEN = REPOSITORY / "tests" / "data" / "public.json"
RECORDS = REPOSITORY / "lorad" / "records"
USER = REPOSITORY / "tests" / "api" / "user_file.py"


def members(kind: type) -> dict[str, str]:
    """Describe the public attributes of a class."""
    return {
        name: "property" if not inspect.isroutine(value) else signature(value)
        for name, value in vars(kind).items()
        if not name.startswith("_")
    }


def signature(function: Any) -> str:
    """Show it alike on each Python: 3.14 names what is of `typing` without its module."""
    return str(inspect.signature(function)).replace("typing.", "")


def surface() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in lorad.__all__:
        value = getattr(lorad, name)
        found[name] = members(value) if inspect.isclass(value) else signature(value)
    return found


def fields() -> dict[str, list[str]]:
    """List the fields of each Struct that is answered with."""
    names = sorted(file.stem for file in RECORDS.glob("[!_]*.py"))
    modules = [importlib.import_module(f"lorad.records.{name}") for name in names]
    kinds = [kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)]
    own = [kind for kind in kinds if issubclass(kind, msgspec.Struct) and is_answer(kind)]
    return {kind.__name__: list(kind.__struct_fields__) for kind in own}


def is_answer(kind: type) -> bool:
    return kind.__module__.startswith("lorad.records") and not kind.__module__.endswith(
        (".requests", ".routes")
    )


def test_public_names_and_arguments_are_the_frozen() -> None:
    assert surface() == json.loads(FROZEN.read_text())["names"]


def test_answers_keep_their_fields() -> None:
    now = fields()
    frozen = json.loads(FROZEN.read_text())["fields"]
    assert [
        f"{name}.{field}" for name in frozen for field in frozen[name] if field not in now.get(name, [])
    ] == []


@pytest.mark.parametrize("name", ["Lorad", "Run", "Sweep"])
def test_async_twins_have_the_same_names(name: str) -> None:
    sync, twin = getattr(lorad, name), getattr(lorad, f"Async{name}")
    assert {*members(sync)} == {*members(twin)} - {"sync"}
    methods = {key for key, value in vars(sync).items() if inspect.isfunction(value) and key[0] != "_"}
    assert {key: members(sync)[key] for key in methods} == {key: members(twin)[key] for key in methods}
    assert twins.AsyncRun.steps.__doc__ == lorad.Run.steps.__doc__


def test_everything_public_is_described() -> None:
    kinds = [getattr(lorad, name) for name in lorad.__all__]
    inside = [
        value for kind in kinds if inspect.isclass(kind) for key, value in vars(kind).items() if key[0] != "_"
    ]
    described = [one for one in (*kinds, *inside) if inspect.isclass(one) or inspect.isroutine(one)]
    assert [one for one in described if not inspect.getdoc(one)] == []


def test_types_are_those_of_the_names() -> None:
    stub = (REPOSITORY / "lorad" / "__init__.pyi").read_text()
    assert sorted(line.split(" as ")[0].strip() for line in stub.splitlines() if " as " in line) == sorted(
        lorad.__all__
    )


def test_importing_lorad_imports_nothing_else() -> None:
    before = "import sys; before = {*sys.modules}"
    loaded_after(f"{before}; import lorad; assert {{*sys.modules}} - before == {{'lorad'}}, sys.modules")
    assert (
        loaded_after("import lorad; lorad.connect, lorad.Run") & {"torch", "numpy", "pandas", "yaml"} == set()
    )


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        getattr(lorad, "conect")  # noqa: B009
    assert "connect" in dir(lorad)


@pytest.mark.long
def test_a_users_file_passes_strict_mypy(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER.read_text())
    command = [sys.executable, "-m", "mypy", "--strict", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


if __name__ == "__main__":
    FROZEN.write_text(json.dumps({"names": surface(), "fields": fields()}, indent=1) + "\n")
