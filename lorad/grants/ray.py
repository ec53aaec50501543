"""The nodes of one life of a pool, from Ray: `python -P -m lorad.grants.ray GRANT_JSON`.

The only module that imports Ray. It runs in an interpreter that has the cluster's own version of Ray, and of
lorad needs nothing but this file: standard library and Ray. It speaks the JSON lines of
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
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any, TypeAlias

ray: Any = None  # see `_connect`: Ray reads its settings from the environment when it is imported
_Json: TypeAlias = dict[str, Any]
_LOOK_SECONDS = 1.0  # between two looks at a group that waits
_PROBE_SECONDS = 30.0  # for a first word with the cluster
_START_SECONDS = 120.0  # for actors and agents, once there is room
_AGAIN_SECONDS = 5.0  # between two tries
_agents = itertools.count(1)
_ENDED = 3  # exit code: all agents ended
_REFUSED = 4
_LINGER_SECONDS = 2.0  # of an actor whose agent ended, for its last answer
# the client of the cluster's head answers in half a second, where ray.init tries a wrong token for 20 s
_PROBE = """
import socket, sys
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
address = canonicalize_bootstrap_address(sys.argv[1])
if not address:
    sys.exit(12)
print(address, flush=True)
host, _, port = address.rpartition(":")
socket.create_connection((host.strip("[]"), int(port)), 3.0).close()
try:
    GcsClient(address=address)
except AuthenticationError:
    sys.exit(11)
"""
_IS_OPEN, _NO_TOKEN = 0, 11  # exit codes of _PROBE; others: no answer


class _RefusedError(Exception):
    """Nothing will be granted. words: why. hint: what to do."""

    def __init__(self, words: str, hint: str) -> None:
        super().__init__(words)
        self.words, self.hint = words, hint


class _Over(Exception):
    """The pool closed the connection."""


class _Pool:
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
        """Wait. Raises _Over."""
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
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "CUDA_VISIBLE"))
        }
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=kept,
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
    pool = _Pool(request["socket"])
    try:
        address = _reach(pool, request["setup"])
        _connect(address, _group_name(request))
        signal.signal(signal.SIGTERM, lambda *_: pool.is_over.set())  # in place of Ray's
        group = _placed(pool, request)
        nodes = _begun(request, group, list(range(request["bundles"])), _START_SECONDS)
        pool.say("Granted", nodes=[node["granted"] for node in nodes])
        _follow(pool, request, group, nodes)
    except _Over:
        return 0
    except _RefusedError as error:
        try:
            pool.say("Refused", words=error.words, hint=error.hint)
        except _Over:
            return 0
        pool.is_over.wait(10.0)  # the pool closes when it has read that
        return _REFUSED
    finally:
        if ray:
            ray.shutdown()
    return _ENDED


def _group_name(request: _Json) -> str:
    """Name the life: while a life that was killed is being cleared up, its group still holds its name."""
    pool, _, life = request["life"].rpartition("@")
    return f"{request['setup'].get('group') or f'lorad/{pool}'}@{life}"


def _reach(pool: _Pool, setup: _Json) -> str:
    """Return the cluster's address once it answers there.

    Raises _RefusedError where it refuses the token, or is open to everybody.
    """
    address, environment = setup.get("address") or "auto", _with_token(setup.get("token_file", ""))
    if address.startswith("ray://"):
        raise _RefusedError(
            f"{address} is the address of a Ray Client server",
            "Give cluster.address as host:port (6379 by default) or auto.",
        )
    os.environ.update(environment)
    while True:
        code, found = _probe(address, environment)
        if code == _NO_TOKEN:
            where = setup.get("token_file") or os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
            has_token = environment["RAY_AUTH_MODE"] == "token"
            raise _RefusedError(
                f"Ray at {found} refuses the token of {where}"
                if has_token
                else f"Ray at {found} asks for a token",
                "Copy the cluster's token into a file of yours with mode 0600, and name that in config.yaml: "
                "cluster.token_file.",
            )
        if code == _IS_OPEN and found:
            break
        pool.say("Waiting", words=f"Ray does not answer at {address}")
        pool.pause(_LOOK_SECONDS)
    without = {"RAY_AUTH_MODE": "disabled"}
    asks = _probe(found, without)[0] == _NO_TOKEN
    if not asks and not setup.get("insecure"):
        raise _RefusedError(
            f"the Ray cluster at {found} asks for no token: whoever reaches its ports runs programs on it",
            "Start it with RAY_AUTH_MODE=token and a token (`ray get-auth-token --generate`), or insist: "
            "cluster.insecure: true.",
        )
    if not asks:
        os.environ.update(without)  # in token mode this process would refuse what the cluster's workers say
    return found


def _with_token(path: str) -> dict[str, str]:
    """Return the variables by which Ray finds the token.

    Raises _RefusedError for a file that others can read.
    """
    if not path:
        named = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & {*os.environ}
        there = named or os.path.exists(os.path.expanduser("~/.ray/auth_token"))
        return {"RAY_AUTH_MODE": "token" if there else "disabled"}
    path = os.path.expanduser(path)
    try:
        found = os.stat(path)
    except OSError as error:
        raise _RefusedError(
            f"cluster.token_file: {path}: {error.strerror}", "Copy the cluster's token there, with mode 0600."
        ) from None
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise _RefusedError(
            f"cluster.token_file: others may read {path}, or it is not yours", f"chmod 600 {path}"
        )
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path}


def _probe(address: str, environment: dict[str, str]) -> tuple[int, str]:
    """Ask the cluster's head for a word; returns an exit code of _PROBE and the address as host:port."""
    secrets = () if environment["RAY_AUTH_MODE"] == "token" else ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    inherited = {key: value for key, value in os.environ.items() if key not in secrets}
    quickly = {"RAY_py_gcs_connect_timeout_s": "5"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            env={**inherited, **quickly, **environment},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout.strip()


def _connect(address: str, namespace: str) -> None:
    """Become the driver of a job of the cluster. Raises _RefusedError."""
    global ray
    try:
        import ray as imported

        ray = imported
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise _RefusedError(
            f"Ray at {address} does not take this process: {_first_line(error)}",
            "This machine must be a node of the cluster (`ray start --address=… --num-gpus=0`), and "
            "cluster.python have the cluster's versions of Ray and Python.",
        ) from None


def _placed(pool: _Pool, request: _Json) -> Any:
    """Wait for room, saying what is lacking; returns the group. The daemon decides for how long."""
    setup, number = request["setup"], request["bundles"]
    bundle = {"CPU": 1.0, **({"GPU": float(setup["devices"])} if setup["devices"] else {})}
    labels = setup.get("labels") or {}
    selectors = {"bundle_label_selector": [labels] * number} if labels else {}
    group = ray.util.placement_group(
        [bundle] * number, strategy="STRICT_SPREAD", name=_group_name(request), **selectors
    )
    while not group.wait(_LOOK_SECONDS):
        pool.say("Waiting", words=_lacking(setup, number))
        pool.pause(0)
    return group


def _lacking(setup: _Json, number: int) -> str:
    """Put into words what is asked for and what there is: "2 x 8 GPUs: 3 nodes alive, 0 GPUs free"."""
    devices, labels = setup["devices"], setup.get("labels") or {}
    alive = [node for node in ray.nodes() if node["Alive"]]
    fitting = [
        node
        for node in alive
        if node["Resources"].get("GPU", 0) >= devices
        and node["Resources"].get("CPU", 0) >= 1
        and all(node.get("Labels", {}).get(key) == value for key, value in labels.items())
    ]
    kind = "GPU" if devices else "CPU"
    free = int(ray.available_resources().get(kind, 0))
    each = f"{devices} GPU{'s' * (devices != 1)}" if devices else "1 CPU"
    like = f" ({', '.join(f'{key}: {value}' for key, value in labels.items())})" if labels else ""
    short = f", {len(fitting)} large enough" if len(fitting) < number else ""
    nodes = f"{len(alive)} node{'s' * (len(alive) != 1)} alive"
    return f"{number} x {each}{like}: {nodes}{short}, {free} {kind}s free"


def _begun(request: _Json, group: Any, bundles: list[int], seconds: float | None) -> list[_Json]:
    """Start an agent in each of these bundles; returns their nodes, sorted by name.

    seconds: that they may take; None waits for bundles that Ray has to place again. Raises _RefusedError.
    """
    setup = request["setup"]
    actors = [_actor(setup, group, index) for index in bundles]
    nodes = _gathered([actor.describe.remote() for actor in actors], seconds)
    for actor, index, node in zip(actors, bundles, nodes, strict=True):
        node.update(actor=actor, index=index)
        if node["uid"] != os.getuid():
            raise _RefusedError(
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
    for node, said in zip(nodes, _gathered(starts, _START_SECONDS), strict=True):
        if said.get("kind") == "Refused":
            raise _RefusedError(str(said.get("words")), str(said.get("hint", "")))
        if "error" in said:
            raise _RefusedError(
                f"no agent starts on {node['node']}: {said['error']}",
                f"Is lorad of this version there, at {python} (cluster.node_python)?",
            )
        node["granted"] = {**said, "node": node["node"], "devices": node["devices"]}
    return nodes


def _actor(setup: _Json, group: Any, index: int) -> Any:
    in_group = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    options = {
        "name": f"lorad-agent {next(_agents)}",
        "num_cpus": 0,
        "num_gpus": setup["devices"],
        "max_restarts": 0,
        "max_concurrency": 3,
        "scheduling_strategy": in_group(group, placement_group_bundle_index=index),
    }
    return ray.remote(_Agent).options(**options).remote()


def _gathered(calls: list[Any], seconds: float | None) -> list[_Json]:
    """Wait for the answers of actors. Raises _RefusedError."""
    try:
        answers: list[_Json] = ray.get(calls, timeout=seconds)
    except Exception as error:
        raise _RefusedError(
            f"a node did not start its agent: {_first_line(error)}",
            "See Ray's logs on the node, and try again.",
        ) from None
    return answers


def _name_nodes(seen: list[_Json], group: Any) -> None:
    """Give each node the name that Ray has for it, else its hostname.

    Nodes of one name are numbered, in the order of their addresses and Ray's ids.
    """
    known = {node["NodeID"]: node for node in ray.nodes()}
    where = ray.util.placement_group_table(group)["bundles_to_node_id"]
    for node in seen:
        ray_node = known.get(where[node["index"]], {})
        given = ray_node.get("NodeName") or node["host"]
        node["node"] = node["host"] if given == ray_node.get("NodeManagerAddress") else given
        node["id"] = where[node["index"]]
    names = [node["node"] for node in seen]
    for name in {name for name in names if names.count(name) > 1}:
        alike = sorted(
            (node for node in seen if node["node"] == name), key=lambda node: (node["ip"], node["id"])
        )
        for number, node in enumerate(alike):
            node["node"] = f"{name}-{number}"


def _follow(pool: _Pool, request: _Json, group: Any, nodes: list[_Json]) -> None:
    """Say which agents end, and how; returns when all have. Raises _Over.

    A node without ranks that is lost gets another agent in its bundle, which Ray places on another node
    where the first one is dead.
    """
    ranks = [node["node"] for node in nodes[: request["setup"]["nodes"]]]
    events: queue.SimpleQueue[tuple[_Json, str]] = queue.SimpleQueue()  # how a node was lost; "": it is new
    for node in nodes:
        _in_thread(lambda node=node: events.put((node, _end_of(node["actor"]))))
    left, is_whole = len(nodes), True
    while left:
        try:
            node, how = events.get(timeout=0.1)
        except queue.Empty:
            pool.pause(0)
            continue
        if how:
            pool.say("Lost", node=node["node"], how=how)
            left -= 1
            is_whole = is_whole and node["node"] not in ranks
            if is_whole:
                _in_thread(lambda node=node: events.put((_again(request, group, node["index"]), "")))
        else:
            pool.say("Granted", nodes=[node["granted"]])
            left += 1
            _in_thread(lambda node=node: events.put((node, _end_of(node["actor"]))))


def _in_thread(work: Any) -> None:
    threading.Thread(target=work, daemon=True).start()


def _again(request: _Json, group: Any, index: int) -> _Json:
    """Start an agent in a bundle that lost its own, however long that takes."""
    while True:
        try:
            return _begun(request, group, [index], None)[0]
        except _RefusedError as error:
            print(f"lorad: {error.words}", file=sys.stderr, flush=True)
            time.sleep(_AGAIN_SECONDS)


def _end_of(actor: Any) -> str:
    try:
        return f"its agent {ray.get(actor.wait.remote())}"
    except Exception as error:
        return f"Ray lost it: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


if __name__ == "__main__":
    sys.exit(main())
