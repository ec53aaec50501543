"""Get the nodes of one life of a pool from Ray: `python -P -m lorad.grants.ray GRANT_JSON`.

The only module that imports Ray. It runs in an interpreter that has the cluster's own version of Ray, and of
lorad needs nothing but this file and `ray_token`: standard library and Ray. It speaks the JSON lines of
`lorad.protocol.nodes`: it reads a `GrantRequest`, connects to the pool's socket and says `Waiting`,
`Granted`, `Refused`, `Lost`.

It takes a placement group with one bundle a node (STRICT_SPREAD) and starts an actor in each, which starts an
agent and holds its stdin. Nothing is detached: this process is the driver of a Ray job, and with it the job,
its group, its actors and so their agents end. It ends when the pool closes the connection, when all agents
have ended, and with its guard.

Nothing secret goes through Ray, which passes everything in pickles and in clear: arguments, the pool's public
certificate, what agents say. The pool checks what actors answer.
"""

import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any, TypeAlias

from lorad.grants.ray_token import RefusedError, reach

ray: Any = None  # see `_connect`
_Json: TypeAlias = dict[str, Any]
_LOOK_SECONDS = 1.0  # between two looks at a group that waits
_START_SECONDS = 120.0  # for actors and agents, once there is room
_AGAIN_SECONDS = 5.0  # between two tries
_agents = itertools.count(1)
_ENDED = 3  # exit code: all agents ended
_REFUSED = 4
_ASKED = (1, 3)  # why Ray went on a node: `ray stop` or a drain, preempted. Actors there get no signal.
_LINGER_SECONDS = 2.0  # of an actor whose agent ended, for its last answer


class _Over(Exception):
    """The pool closed the connection."""


class _PoolConnection:
    """The connection to the pool: lines go there, and nothing is read but its end."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._said = ""
        self.is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def say(self, kind: str, **fields: object) -> None:
        """Send one line; a line that repeats the one before is left out. Raises _Over."""
        line = json.dumps({"kind": kind, **fields})
        if self.is_over.is_set():
            raise _Over
        if line != self._said:
            self._said = line
            try:
                self._socket.sendall(line.encode() + b"\n")
            except OSError:
                raise _Over from None

    def pause(self, seconds: float) -> None:
        if self.is_over.wait(seconds):
            raise _Over

    def _watch(self) -> None:
        try:
            while self._socket.recv(4096):
                pass
        except OSError:
            pass
        self.is_over.set()


class _Agent:
    """An actor: starts an agent on its node and holds its stdin, whose end is the agent's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors: deque[str] = deque(maxlen=15)

    def describe(self) -> _Json:
        """Return what the node says of itself before anything of lorad is started there."""
        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return {
            "host": socket.gethostname(),
            "ip": ray.util.get_node_ip_address(),
            "uid": os.getuid(),
            "devices": [str(device) for device in devices],
        }

    def start(self, argv: list[str], first_line: str) -> _Json:
        """Start the agent; returns its line, or `error`."""
        hidden = ("RAY_", "CUDA_VISIBLE")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                cwd="/",
                start_new_session=True,  # it sees the end of stdin, whatever ends the actor
            )
        except OSError as error:
            return {"error": f"cannot start {argv[0]}: {error.strerror}"}
        assert process.stdin and process.stdout
        self._process = process
        reader = threading.Thread(target=self._read_errors, daemon=True)
        reader.start()
        try:
            process.stdin.write(first_line + "\n")
            process.stdin.flush()
            said = json.loads(process.stdout.readline(1 << 20))
        except (OSError, ValueError):
            process.stdin.close()
            reader.join(2.0)
            return {"error": "\n".join(self._errors) or f"{' '.join(argv)} said nothing"}
        return said if isinstance(said, dict) else {"error": "it said no JSON object"}

    def wait(self) -> str:
        """Return how the agent ended, once it did."""
        assert self._process
        code = self._process.wait()
        threading.Timer(_LINGER_SECONDS, os._exit, [0]).start()  # also where nobody can tell it to end
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"{how}: {self._errors[-1]}" if code > 0 and self._errors else how

    def _read_errors(self) -> None:
        assert self._process and self._process.stderr
        for line in self._process.stderr:
            self._errors.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)


def main() -> int:
    with open(sys.argv[1]) as file:
        request = json.load(file)
    pool = _PoolConnection(request["socket"])
    try:
        _connect(pool, request)
        signal.signal(signal.SIGTERM, lambda *_: pool.is_over.set())  # in place of Ray's
        group = _wait_for_group(pool, request)
        nodes = _start_agents(request, group, list(range(_count(request["setup"]))), _START_SECONDS)
        pool.say("Granted", nodes=[node["granted"] for node in nodes])
        _follow(pool, request, group, nodes)
    except _Over:
        return 0
    except RefusedError as error:
        try:
            pool.say("Refused", words=error.words, hint=error.hint)
        except _Over:
            return 0
        pool.is_over.wait(10.0)  # the pool closes when it has read that
        return _REFUSED
    finally:
        if ray and ray.is_initialized():
            ray.shutdown()
    return _ENDED


def _group_name(request: _Json) -> str:
    """Name the life: while a life that was killed is being cleared up, its group still holds its name."""
    pool, _, life = request["life"].rpartition("@")
    return f"{request['setup'].get('group') or f'lorad/{pool}'}@{life}"


def _connect(pool: _PoolConnection, request: _Json) -> None:
    """Become the driver of a job of the cluster, once that answers. Raises RefusedError."""
    global ray
    hint = "cluster.python have the cluster's versions of Ray and Python."
    try:
        import ray as imported  # half a second of a processor
    except Exception as error:
        words = f"{sys.executable} has no Ray that can be imported: {_first_line(error)}"
        raise RefusedError(words, f"Let {hint}") from None
    ray = imported
    address = reach(pool, request["setup"], ray)
    try:
        ray.init(address=address, namespace=_group_name(request), log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise RefusedError(
            f"Ray at {address} does not take this process: {_first_line(error)}",
            "This machine must be a node of the cluster (`ray start --address=… --num-gpus=0`), and " + hint,
        ) from None


def _count(setup: _Json) -> int:
    nodes: int = setup["nodes"] + setup.get("rollout_nodes", 0)
    return nodes


def _wait_for_group(pool: _PoolConnection, request: _Json) -> Any:
    """Wait for room, saying what is lacking; returns the group. The daemon decides for how long.

    Nodes that had the base and have room are tried first, but not where servers have nodes of their own: a
    bundle that is bound to a node is on no other when that one dies.
    """
    setup = request["setup"]
    if not setup.get("rollout_nodes"):
        free = ray._private.state.available_resources_per_node()
        bundle = _bundle(setup)
        warm = [
            node["NodeID"]
            for node in _fitting(setup)
            if node["NodeManagerAddress"] in setup.get("warm", ())
            and all(free.get(node["NodeID"], {}).get(kind, 0) >= size for kind, size in bundle.items())
        ]
        if warm:
            group = _group(request, warm[: _count(setup)])
            if group.wait(_LOOK_SECONDS):
                return group
            ray.util.remove_placement_group(group)
    group = _group(request, [])
    devices = setup["devices"]
    kind = "GPU" if devices else "CPU"
    each = f"{devices} GPU{'s' * (devices != 1)}" if devices else "1 CPU"
    labels = ", ".join(f"{key}: {value}" for key, value in (setup.get("labels") or {}).items())
    needs = f"{_count(setup)} x {each}" + (f" ({labels})" if labels else "")
    while not group.wait(_LOOK_SECONDS):
        alive = [node for node in ray.nodes() if node["Alive"]]
        fitting = len(_fitting(setup))
        short = f", {fitting} large enough" if fitting < _count(setup) else ""
        free = int(ray.available_resources().get(kind, 0))
        nodes = f"{len(alive)} node{'s' * (len(alive) != 1)} alive"
        pool.say("Waiting", words=f"{needs}: {nodes}{short}, {free} {kind}s free")
        pool.pause(0)
    return group


def _group(request: _Json, ids: list[str]) -> Any:
    """Ask for a bundle a node; the first ones must be on the nodes of these ids of Ray's."""
    setup = request["setup"]
    number = _count(setup)
    labels = setup.get("labels") or {}
    asked = [{**labels, "ray.io/node-id": node} for node in ids] + [labels] * (number - len(ids))
    return ray.util.placement_group(
        [_bundle(setup)] * number,
        strategy="STRICT_SPREAD",
        name=_group_name(request),
        **({"bundle_label_selector": asked} if any(asked) else {}),
    )


def _bundle(setup: _Json) -> dict[str, float]:
    return {"CPU": 1.0, **({"GPU": float(setup["devices"])} if setup["devices"] else {})}


def _fitting(setup: _Json) -> list[_Json]:
    """List the nodes that would do if nobody used them."""
    labels = setup.get("labels") or {}
    return [
        node
        for node in ray.nodes()
        if node["Alive"]
        and all(node["Resources"].get(kind, 0) >= size for kind, size in _bundle(setup).items())
        and all(node.get("Labels", {}).get(key) == value for key, value in labels.items())
    ]


def _start_agents(request: _Json, group: Any, bundles: list[int], seconds: float | None) -> list[_Json]:
    """Start an agent in each of these bundles within so many seconds; returns their nodes, sorted by name.

    None waits for bundles that Ray has to place again. Raises RefusedError.
    """
    setup = request["setup"]
    actors = []
    for index in bundles:
        in_group = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options = {
            "name": f"lorad-agent {next(_agents)}",
            "num_cpus": 0,
            "num_gpus": setup["devices"],
            "max_restarts": 0,
            "max_concurrency": 3,
            "scheduling_strategy": in_group(group, placement_group_bundle_index=index),
        }
        actors.append(ray.remote(_Agent).options(**options).remote())
    nodes = _answers_of([actor.describe.remote() for actor in actors], seconds)
    for actor, index, node in zip(actors, bundles, nodes, strict=True):
        node.update(actor=actor, index=index)
        if node["uid"] != os.getuid():
            raise RefusedError(
                f"the cluster is user {node['uid']}'s on {node['host']}, and this pool user {os.getuid()}'s",
                "A Ray cluster is one user's: start one as that user, or use cluster.kind: static.",
            )
    _name_nodes(nodes, group)
    nodes.sort(key=lambda node: str(node["node"]))
    python = setup["python"]  # grants.grant fills it in: this interpreter is the cluster's
    starts = [
        node["actor"].start.remote(
            [python, *request["agent"], "--address", node["ip"], "--name", node["node"]],
            json.dumps({"certificate": request["certificate"], "devices": node["devices"]}),
        )
        for node in nodes
    ]
    for node, answer in zip(nodes, _answers_of(starts, _START_SECONDS), strict=True):
        if answer.get("kind") == "Refused":
            raise RefusedError(str(answer.get("words")), str(answer.get("hint", "")))
        if "error" in answer:
            raise RefusedError(
                f"no agent starts on {node['node']}: {answer['error']}",
                f"Is lorad of this version there, at {python} (cluster.node_python)?",
            )
        node["granted"] = {**answer, "node": node["node"], "devices": node["devices"]}
    return nodes


def _answers_of(calls: list[Any], seconds: float | None) -> list[_Json]:
    """Wait for the answers of actors. Raises RefusedError."""
    try:
        answers: list[_Json] = ray.get(calls, timeout=seconds)
    except Exception as error:
        raise RefusedError(
            f"a node did not start its agent: {_first_line(error)}",
            "See Ray's logs on the node, and try again.",
        ) from None
    return answers


def _name_nodes(seen: list[_Json], group: Any) -> None:
    """Give each node the name that Ray has for it, else its hostname.

    Nodes of one name are numbered, in the order of their addresses and Ray's ids.
    """
    by_id = {node["NodeID"]: node for node in ray.nodes()}
    where = ray.util.placement_group_table(group)["bundles_to_node_id"]
    for node in seen:
        ray_node = by_id.get(where[node["index"]], {})
        name = ray_node.get("NodeName") or node["host"]
        node["node"] = node["host"] if name == ray_node.get("NodeManagerAddress") else name
        node["id"] = where[node["index"]]
    names = [node["node"] for node in seen]
    for name in {name for name in names if names.count(name) > 1}:
        alike = [node for node in seen if node["node"] == name]
        for number, node in enumerate(sorted(alike, key=lambda node: (node["ip"], node["id"]))):
            node["node"] = f"{name}-{number}"


def _follow(pool: _PoolConnection, request: _Json, group: Any, nodes: list[_Json]) -> None:
    """Say which agents end, and how; returns when all have. Raises _Over.

    A node without ranks that is lost gets another agent in its bundle, which Ray places on another node
    where the first one is dead.
    """
    ranks = [node["node"] for node in nodes[: request["setup"]["nodes"]]]
    events: queue.SimpleQueue[tuple[_Json, _Json]] = queue.SimpleQueue()  # how a node was lost; {}: it is new
    for node in nodes:
        _in_thread(lambda node=node: events.put((node, _end_of(node))))
    left = len(nodes)
    is_whole = True
    while left:
        try:
            node, how = events.get(timeout=0.1)
        except queue.Empty:
            pool.pause(0)
            continue
        if how:
            pool.say("Lost", node=node["node"], **how)
            left -= 1
            is_whole = is_whole and node["node"] not in ranks
            if is_whole:
                _in_thread(lambda node=node: events.put((_restart_agent(request, group, node["index"]), {})))
        else:
            pool.say("Granted", nodes=[node["granted"]])
            left += 1
            _in_thread(lambda node=node: events.put((node, _end_of(node))))


def _in_thread(work: Any) -> None:
    threading.Thread(target=work, daemon=True).start()


def _restart_agent(request: _Json, group: Any, index: int) -> _Json:
    """Start an agent in a bundle that lost its own, however long that takes."""
    while True:
        try:
            return _start_agents(request, group, [index], None)[0]
        except RefusedError as error:
            print(f"lorad: {error.words}", file=sys.stderr, flush=True)
            time.sleep(_AGAIN_SECONDS)


def _end_of(node: _Json) -> _Json:
    """Wait for the end of a node's agent; returns how that was, and whether Ray was asked to go there."""
    try:
        return {"how": f"its agent {ray.get(node['actor'].wait.remote())}"}
    except Exception as error:
        try:
            mine = [each for each in ray.nodes() if each["NodeID"] == node["id"]]
        except Exception:  # Ray is gone altogether
            mine = []
        is_asked = any(each.get("DeathReason") in _ASKED for each in mine)
        return {"how": f"Ray lost it: {_first_line(error)}", "is_asked": is_asked}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


if __name__ == "__main__":
    sys.exit(main())
