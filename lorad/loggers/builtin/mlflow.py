"""Writes to MLflow: an MLflow run for each segment, so that steps that a rewind took back stay apart.

A batch may be sent again: the same metric, value, time and step is one row.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from lorad.box.private import read_key
from lorad.loggers.logger import LoggedRun, Logger, Point, Segment, Settings, flattened

_BATCH = 1000  # metrics that the server takes at once
_PARAMS = 100  # parameters of a run, at most
_PARAM_TEXT = 500  # characters of a parameter, at most
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
        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient

        with self._as_user():
            self._client = client = MlflowClient(self.settings.uri)
            existing = client.get_experiment_by_name(self.settings.experiment)
            if existing is not None:
                experiment = str(existing.experiment_id)
            else:
                experiment = str(client.create_experiment(self.settings.experiment))
            name = f"{self.run.name}.{segment.number}" if segment.number else self.run.name
            mine = f"tags.`lorad.run` = '{self.run.name}' and tags.`lorad.born` = '{self.run.born!r}'"
            runs = {run.data.tags["lorad.segment"]: run for run in client.search_runs([experiment], mine)}
            run = runs.get(str(segment.number))
            if run is None:
                tags = {
                    "lorad.run": self.run.name,
                    "lorad.born": repr(self.run.born),
                    "lorad.segment": str(segment.number),
                    "lorad.from_step": str(segment.after),
                }
                run = client.create_run(experiment, run_name=name, tags=tags)
                # the spec as MLflow's parameters, as many and as long as it takes
                settings = [pair for pair in flattened("", self.run.spec, ".") if pair[1] is not None]
                params = [Param(key, str(value)[:_PARAM_TEXT]) for key, value in settings[:_PARAMS]]
                client.log_batch(run.info.run_id, params=params)
            self._id = run.info.run_id
            client.update_run(self._id, status="RUNNING")
            for number, other in runs.items():
                is_earlier = int(number) < segment.number
                marked = int(other.data.tags.get("lorad.superseded_after", 1 << 62))
                if is_earlier and marked > segment.after:
                    tag = RunTag("lorad.superseded_after", str(segment.after))
                    client.log_batch(other.info.run_id, tags=[tag])

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

    @contextlib.contextmanager
    def _as_user(self) -> Iterator[None]:
        """Have MLflow find the key while this thread asks the server."""
        if self.settings.key_file is None:
            yield
            return
        with _environment:
            user = self.settings.user
            key = read_key(self.settings.key_file)
            variables = {_TOKEN: key} if user is None else {_USER: user, _PASSWORD: key}
            os.environ |= variables
            try:
                yield
            finally:
                for name in variables:
                    os.environ.pop(name, None)
