"""One real server of each kind for all tests here; `make test-engines` installs them.

Without one its tests skip.
"""

import inspect
import shutil
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from lorad.adapters.targets import experts_of, leaf
from lorad.backends.setup import targets
from lorad.engines.base import Engine
from lorad.engines.remote.engine import RemoteEngine
from tests.conformance import expert_adapters
from tests.engines.real.own_names import OwnNames
from tests.engines.real.places import KINDS, OF_RUNS, SHAPES, opened, python_of, variable
from tests.kit.fakes.random_adapters import Shapes
from tests.kit.warm.ranks import interpreter

HERE = Path(__file__).parent
TAIL = 40  # lines of a server's log under a test that failed


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine belongs to one event loop: its tests share the session's.

    Of several workers, one has all that share the server of a kind, while others have the files that start
    their own. Comes before xdist's own hook, which reads the groups.
    """
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if inspect.iscoroutinefunction(getattr(item, "function", None)):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            shares = {"server", "mixture"} & {*item.fixturenames}
            where = "" if shares else f"{item.path.stem}-"
            item.add_marker(pytest.mark.xdist_group(f"{where}{item.callspec.params.get('kind')}"))


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """`@pytest.mark.parametrize("kind", ["vllm"], indirect=True)` is for a test of one kind only."""
    if not python_of(request.param):
        pytest.skip(
            f"{variable(request.param)} names no interpreter: `make test-engines` installs the real server"
        )
    return str(request.param)


@pytest.fixture(scope="session")
def work(kind: str) -> Iterator[Path]:
    """The directory of the server's logs; a short one, for sockets."""
    directory = Path(tempfile.mkdtemp(prefix=f"lr-{kind}-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(kind: str, work: Path) -> AsyncIterator[RemoteEngine]:
    """The engine behind `engine`, started once."""
    async with opened(kind, work) as engine:
        yield engine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mixture(kind: str, work: Path) -> AsyncIterator[RemoteEngine]:
    """A second server, whose base is a mixture, started as for a run that adapts experts. SGLang tells the
    routes of tokens.
    """
    (work / "moe").mkdir()
    of_experts = {leaf(name) for name in expert_adapters.SHAPES if experts_of(name)}
    others = {leaf(name) for name in expert_adapters.SHAPES} - of_experts
    wanted = targets(expert_adapters.SHAPES, others, of_experts)
    async with opened(
        *(kind, work / "moe", expert_adapters.MOE),
        python=interpreter(python_of(kind)),
        env=OF_RUNS[kind],
        targets=wanted,
        routes=kind == "sglang",
    ) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def engine(server: RemoteEngine) -> AsyncIterator[Engine]:
    """The shared engine as if nobody had used it: nothing loaded, nothing in flight, every name free."""
    own = OwnNames(server)
    yield own
    await own.close()


@pytest.fixture
def shapes() -> Shapes:
    return SHAPES


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows the end of its server's log."""
    report = yield
    directory = getattr(item, "funcargs", {}).get("work")
    if report.failed and isinstance(directory, Path):
        for log in sorted(directory.glob("*.log")):
            tail = log.read_text(errors="replace").splitlines()[-TAIL:]
            report.sections.append((f"the end of {log.name}", "\n".join(tail)))
    return report
