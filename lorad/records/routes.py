"""Every request of the daemon's API: where it goes, the Struct of its body and the Struct of its answer.

`Client` sends them, the handlers of the same names in `lorad/daemon/api/verbs` answer. A list comes as
`{"items": [...]}`; `read_events` without `last`, and `try_out`, answer with a line of JSON for each item.
`archive` answers with a tar.
"""

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from lorad.errors import NotFound
from lorad.records import (
    bill,
    checks,
    daemon,
    devices,
    measured,
    pools,
    requests,
    runs,
    samples,
    sweeps,
    versions,
)

Answered = TypeVar("Answered")


class Route(NamedTuple, Generic[Answered]):
    """A request of the API; `path` has the names of its variable parts in braces."""

    method: str
    path: str
    answer: type[Answered]
    request: type[requests.RequestBody] | None = None

    def address(self, names: Mapping[str, str]) -> str:
        """Return the path with the names filled in. Raises NotFound for what would be another path."""
        if (run := names.get("run")) in ("", ".", ".."):
            raise NotFound(f"no run named {run!r}", hint="`lorad list --all` shows every run.")
        return self.path.format_map({part: quote(name, safe="") for part, name in names.items()})


class Api:
    """The routes by their verbs."""

    show_status = Route("GET", "/v1/status", daemon.Status)
    show_metrics = Route("GET", "/v1/metrics", str)
    check_database = Route("GET", "/v1/database", daemon.Census)
    list_orphans = Route("GET", "/v1/orphans", list[daemon.Orphan])
    read_own_log = Route("GET", "/v1/logs", runs.LogPart)
    shutdown = Route("POST", "/v1/shutdown", daemon.Shutdown, requests.ShutdownRequest)
    list_pools = Route("GET", "/v1/pools", list[pools.Pool])
    stop_pool = Route("DELETE", "/v1/pools/{pool}", pools.Pool)
    list_nodes = Route("GET", "/v1/nodes", list[pools.NodeStatus])
    list_devices = Route("GET", "/v1/devices", list[devices.Device])
    reserve_device = Route("POST", "/v1/devices/{device}/reserve", devices.Device, requests.ReserveRequest)
    release_device = Route("DELETE", "/v1/devices/{device}/reservation", devices.Device)
    show_bill = Route("GET", "/v1/bill", bill.Bill)
    read_events = Route("GET", "/v1/events", list[runs.Event])
    run = Route("POST", "/v1/runs", runs.Run, requests.RunRequest)
    check = Route("POST", "/v1/check", checks.Check, requests.RunRequest)
    send_files = Route("PUT", "/v1/bundles/{bundle}", checks.Bundle, requests.BundleRequest)
    list_runs = Route("GET", "/v1/runs", list[runs.Run])
    select_runs = Route("POST", "/v1/select", list[runs.Run], requests.SelectRequest)
    show_run = Route("GET", "/v1/runs/{run}", runs.RunDetails)
    remove = Route("DELETE", "/v1/runs/{run}", runs.Removed)
    resume = Route("POST", "/v1/runs/{run}/resume", runs.Resumed, requests.ResumeRequest)
    pause = Route("POST", "/v1/runs/{run}/pause", runs.Run)
    stop = Route("POST", "/v1/runs/{run}/stop", runs.Run)
    kill = Route("POST", "/v1/runs/{run}/kill", runs.Run)
    label = Route("POST", "/v1/runs/{run}/labels", runs.Run, requests.LabelRequest)
    edit = Route("POST", "/v1/runs/{run}/edit", runs.Run, requests.EditRequest)
    rename = Route("POST", "/v1/runs/{run}/rename", runs.Run, requests.RenameRequest)
    list_groups = Route("GET", "/v1/groups", list[runs.RunGroup])
    limit_group = Route("POST", "/v1/groups/{group}", runs.RunGroup, requests.GroupRequest)
    list_steps = Route("GET", "/v1/runs/{run}/steps", list[measured.Step])
    list_evals = Route("GET", "/v1/runs/{run}/evals", list[measured.Evaluation])
    list_samples = Route("GET", "/v1/runs/{run}/samples", list[samples.Sample])
    read_log = Route("GET", "/v1/runs/{run}/logs", runs.LogPart)
    list_logs = Route("GET", "/v1/runs/{run}/logs/names", list[str])
    list_checkpoints = Route("GET", "/v1/runs/{run}/checkpoints", list[versions.Checkpoint])
    list_versions = Route("GET", "/v1/versions", list[versions.Version])
    archive = Route("GET", "/v1/versions/{version}/archive", bytes)
    export = Route("POST", "/v1/versions/{version}/export", versions.Exported, requests.ExportRequest)
    pin = Route("POST", "/v1/versions/{version}/pin", versions.Version)
    unpin = Route("POST", "/v1/versions/{version}/unpin", versions.Version)
    discard_files = Route("DELETE", "/v1/versions/{version}", versions.Version)
    fork = Route("POST", "/v1/versions/{version}/fork", runs.Forked, requests.ForkRequest)
    keep_result = Route("POST", "/v1/versions/{version}/results", measured.Result, requests.ResultRequest)
    list_results = Route("GET", "/v1/results", list[measured.Result])
    list_aliases = Route("GET", "/v1/aliases", list[versions.ServedAlias])
    swap = Route("POST", "/v1/aliases/{alias}", versions.Swapped, requests.SwapRequest)
    remove_alias = Route("DELETE", "/v1/aliases/{alias}", versions.RemovedAlias)
    list_moves = Route("GET", "/v1/aliases/{alias}/moves", list[versions.AliasMove])
    verify = Route("POST", "/v1/runs/{run}/verify", daemon.Verification)
    collect = Route("POST", "/v1/gc", daemon.Collected, requests.CollectRequest)
    serve = Route("POST", "/v1/serve", versions.ServedModel, requests.ServeRequest)
    stop_serving = Route("POST", "/v1/serve/stop", versions.StoppedServing, requests.ModelRequest)
    bring_up = Route("POST", "/v1/serving", versions.LoadedModel, requests.ModelRequest)
    bring_up_base = Route("POST", "/v1/serving/base", versions.LoadedModel, requests.RunRequest)
    find_owner = Route("POST", "/v1/serving/owner", versions.ServingOwner, requests.OwnerRequest)
    find_door = Route("POST", "/v1/tinker/owner", versions.DoorOwner, requests.DoorRequest)
    sweep = Route("POST", "/v1/sweeps", sweeps.StartedSweep, requests.SweepRequest)
    list_sweeps = Route("GET", "/v1/sweeps", list[sweeps.Sweep])
    try_out = Route("POST", "/v1/try", list[samples.TrialEvent], requests.TrialRequest)
    generate = Route("POST", "/v1/generate", versions.Completions, requests.GenerateRequest)


ROUTES: dict[str, Route[Any]] = {name: route for name, route in vars(Api).items() if isinstance(route, Route)}
