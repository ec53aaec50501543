"""The handlers of requests, in files by subject; each has the name of its route in `lorad.records.routes`."""

from lorad.daemon.access import Access
from lorad.daemon.api.verbs import (
    aliases,
    box,
    check,
    control,
    events,
    fork,
    gc,
    generate,
    logs,
    pools,
    resume,
    runs,
    samples,
    serve,
    serving,
    sweeps,
    trial,
    verify,
    versions,
)
from lorad.daemon.api.verbs.marks import edit, groups, labels
from lorad.records.routes import ROUTES as API

_ANY, _READ, _OWN, _ADMIN = Access

_ACCESS = {
    box.show_status: _ANY,
    box.show_metrics: _ANY,
    box.check_database: _ADMIN,
    box.list_orphans: _ADMIN,
    logs.read_own_log: _ANY,
    box.shutdown: _ADMIN,
    pools.list_pools: _ANY,
    pools.stop_pool: _OWN,
    pools.list_nodes: _ANY,
    box.list_devices: _ANY,
    box.reserve_device: _ANY,
    box.release_device: _ANY,
    box.show_bill: _ANY,
    events.read_events: _READ,
    runs.run: _ANY,
    check.check: _ANY,
    check.send_files: _ANY,
    runs.list_runs: _ANY,
    runs.select_runs: _ANY,
    runs.show_run: _READ,
    control.remove: _OWN,
    resume.resume: _OWN,
    control.pause: _OWN,
    control.stop: _OWN,
    control.kill: _OWN,
    labels.label: _OWN,
    edit.edit: _OWN,
    labels.rename: _OWN,
    groups.list_groups: _ANY,
    groups.limit_group: _ANY,
    runs.list_steps: _READ,
    runs.list_evals: _READ,
    samples.list_samples: _READ,
    logs.read_log: _READ,
    logs.list_logs: _READ,
    versions.list_checkpoints: _READ,
    versions.list_versions: _READ,
    versions.archive: _READ,
    versions.export: _READ,
    versions.pin: _OWN,
    versions.unpin: _OWN,
    versions.discard_files: _OWN,
    fork.fork: _READ,
    versions.keep_result: _OWN,
    versions.list_results: _READ,
    aliases.list_aliases: _ANY,
    aliases.swap: _OWN,
    aliases.remove_alias: _READ,
    aliases.list_moves: _READ,
    verify.verify: _READ,
    gc.collect: _ANY,
    serve.serve: _ANY,
    serving.stop_serving: _ANY,
    serving.bring_up: _READ,
    serving.bring_up_base: _ANY,
    serving.find_owner: _ADMIN,
    serving.find_door: _ADMIN,
    sweeps.sweep: _ANY,
    sweeps.list_sweeps: _ANY,
    trial.try_out: _ANY,
    generate.generate: _READ,
}
ROUTES = tuple(
    (API[handler.__name__].method, API[handler.__name__].path, handler, access)
    for handler, access in _ACCESS.items()
)
"""Method, path, handler and access of each request."""

SLOW = {
    *(runs.run, check.check, resume.resume, fork.fork, sweeps.sweep),
    *(aliases.swap, serve.serve, generate.generate),
}
"""The handlers that may wait for a check, a pool or a gateway; `lines.py` answers with what is being done."""
