"""MLflow: one MLflow run for each segment, so that what a rewind took back stays apart.

The same metric, value, time and step twice is one row: a batch may be sent again.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from lorad.box.private import read_key
from lorad.loggers.logger import LoggedRun, Logger, Point, Segment, Settings

_BATCH = 1000  # metrics that the server takes at once
_PARAMS, _PARAM_TEXT = 100, 500
_TOKEN, _USER, _PASSWORD = (f"MLFLOW_TRACKING_{what}" for what in ("TOKEN", "USERNAME", "PASSWORD"))
_environment = threading.RLock()  # MLflow reads its key from there
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "lost": "FAILED", "attestation_failed": "FAILED"}


class _MlflowSettings(Settings, frozen=True, kw_only=True):
    """The keys of `mlflow`.

    Attributes:
        uri: the tracking server (`https://…`) or a database (`sqlite:////path/to/mlflow.db`).
        experiment: experiment in which the runs are.
        user: who writes, where the server asks for a name and a password; null where it takes a token.
        key_file: file that holds the password of `user`, else the token; readable by its owner only.
    """

    uri: str
    experiment: str = "lorad"
    user: str | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        if self.user is not None and self.key_file is None:
            raise ValueError("user is given, and no key_file with the password")
        if self.uri.startswith("sqlite:///") and not self.uri.startswith("sqlite:////"):
            raise ValueError("uri has a relative path: sqlite:////path/to/mlflow.db has all of it")


class MLflow(Logger):
    settings_type = _MlflowSettings
    modules = ("mlflow", "sqlalchemy", "alembic")
    extra = "mlflow"
    place = "uri"

    def __init__(self, run: LoggedRun, settings: Any) -> None:
        super().__init__(run, settings)
        self._client: Any = None
        self._id = ""
        self._rows: list[Any] = []

    def begin(self, segment: Segment, after: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the follower tries again itself
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # seconds: a hang is told soon
        from mlflow.entities import RunTag
        from mlflow.tracking import MlflowClient

        with self._as_user():
            self._client = client = MlflowClient(self.settings.uri)
            experiment = self._experiment()
            name = f"{self.run.name}.{segment.number}" if segment.number else self.run.name
            mine = f"tags.`lorad.run` = '{self.run.name}' and tags.`lorad.born` = '{self.run.born!r}'"
            there = {run.data.tags["lorad.segment"]: run for run in client.search_runs([experiment], mine)}
            found = there.get(str(segment.number))
            if found is None:
                tags = {
                    "lorad.run": self.run.name,
                    "lorad.born": repr(self.run.born),
                    "lorad.segment": str(segment.number),
                    "lorad.from_step": str(segment.after),
                }
                found = client.create_run(experiment, run_name=name, tags=tags)
                client.log_batch(found.info.run_id, params=self._params())
            self._id = found.info.run_id
            client.update_run(self._id, status="RUNNING")
            for number, run in there.items():
                earlier = int(number) < segment.number
                marked = int(run.data.tags.get("lorad.superseded_after", 1 << 62))
                if earlier and marked > segment.after:
                    tag = RunTag("lorad.superseded_after", str(segment.after))
                    client.log_batch(run.info.run_id, tags=[tag])

    def put(self, point: Point) -> None:
        from mlflow.entities import Metric

        at = int(point.at * 1000)
        # MLflow takes no @ in a name
        values = {name.replace("@", "_"): value for name, value in point.values.items()}
        self._rows += [Metric(name, value, at, point.step) for name, value in values.items()]

    def flush(self) -> None:
        with self._as_user():
            for first in range(0, len(self._rows), _BATCH):
                self._client.log_batch(self._id, metrics=self._rows[first : first + _BATCH])
        self._rows = []

    def close(self, reason: str = "") -> None:
        if reason and self._id:
            with self._as_user():
                self._client.set_terminated(self._id, status=_STATUS.get(reason, "KILLED"))

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self.settings.experiment)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(self.settings.experiment))

    def _params(self) -> list[Any]:
        """The spec as MLflow's parameters, as many and as long as it takes."""
        from mlflow.entities import Param

        flat = _flat("", self.run.spec)
        return [Param(key, str(value)[:_PARAM_TEXT]) for key, value in flat][:_PARAMS]

    @contextlib.contextmanager
    def _as_user(self) -> Iterator[None]:
        """Have MLflow find the key while this thread asks the server."""
        if self.settings.key_file is None:
            yield
            return
        with _environment:
            user, key = self.settings.user, read_key(self.settings.key_file)
            given = {_TOKEN: key} if user is None else {_USER: user, _PASSWORD: key}
            os.environ |= given
            try:
                yield
            finally:
                for name in given:
                    os.environ.pop(name, None)


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    """List dotted keys of the spec with their values; what is null is left out."""
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flat(f"{name}.{key}".lstrip("."), inner)]
    return [] if value is None else [(name, value)]
