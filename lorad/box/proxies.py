"""Keep lorad and its programs from asking a proxy for this machine: proxies are for others."""

from collections.abc import Mapping

_LOOPBACK = ("127.0.0.1", "localhost", "0.0.0.0")  # without IPv6, on which httpx falls over there


def past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which programs ask this machine directly; none where no proxy is in the way."""
    names = [name for name, value in environment.items() if name.lower().endswith("_proxy") and value]
    before = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = [host.strip() for host in before.split(",") if host.strip()]
    missing = [host for host in _LOOPBACK if host not in hosts]
    if "*" in hosts or not missing or not {name.lower() for name in names} - {"no_proxy"}:
        return {}
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join([*hosts, *missing]))
