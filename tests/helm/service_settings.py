"""Finds out what a rendered container would run with: its command line and environment, given to
the service's own program with `--check`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import decode_node.main
import prefill_node.main
import role_node.main
import router.main
from tests.helm.helm_engine import Manifest, Rendered
from tests.helm.scenarios import pods, rendered
from tests.security.authority import Authority

POD_IP = "10.1.2.3"
SECRET = "from-a-secret-of-the-cluster"
_OF_A_POD = "metadata.name", "metadata.uid", "metadata.namespace", "spec.nodeName"
_MOUNTS = "/etc/tandem"
_KEY_FILE = f"""[[tenants]]
name = "one"
keys = ["sha256:{hashlib.sha256(SECRET.encode()).hexdigest()}"]
"""
PROGRAMS = {
    "prefill": prefill_node.main.main,
    "decode": decode_node.main.main,
    "node": role_node.main.main,
    "router": router.main.main,
}
PREFIXES = {"router": "TANDEM_ROUTER_", **dict.fromkeys(("prefill", "decode", "node"), "TANDEM_")}


class WrongSettings(Exception):
    """The service refuses its command line. The message is the service's."""


def containers(objects: Rendered) -> dict[str, Manifest]:
    """Maps a service to its container, of those that run one."""
    found = {}
    for pod in pods(objects).values():
        for container in pod["spec"]["containers"]:
            command = container.get("command", [""])
            if "tandem" in command and command[-1] in PROGRAMS:
                found[command[-1]] = container
    return found


def environment(container: Manifest, pod_ip: str = POD_IP) -> dict[str, str]:
    """Builds the environment as Kubernetes would make it, with one address and one secret."""
    found = {}
    for variable in container.get("env", []):
        source = variable.get("valueFrom")
        if source is None:
            found[variable["name"]] = variable["value"]
        elif "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            assert path in ("status.podIP", *_OF_A_POD), source
            found[variable["name"]] = pod_ip if path == "status.podIP" else f"its {path}"
        else:
            assert set(source) == {"secretKeyRef"}, source
            found[variable["name"]] = SECRET
    return found


def arguments(container: Manifest, pod_ip: str = POD_IP) -> list[str]:
    """Returns the arguments with `$(NAME)` put in, as Kubernetes does."""
    variables = environment(container, pod_ip)
    return [_expand(text, variables) for text in container["args"]]


def _expand(text: str, variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    assert "$(" not in text, f"{text} names a variable that is not set"
    return text


def check(service: str, container: Manifest, pod_ip: str = POD_IP) -> dict[str, Any]:
    """Returns the settings that the service takes from it. Raises `WrongSettings`."""
    argv = [service, *_with_key_files(arguments(container, pod_ip)), "--check"]
    out, err = io.StringIO(), io.StringIO()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
    with (
        patch.object(sys, "argv", argv),
        patch.dict(os.environ, {**inherited, **environment(container, pod_ip)}, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = PROGRAMS[service]()
        except SystemExit as end:
            code = end.code
    if code != 0:
        raise WrongSettings(f"{service} exits with {code}: {err.getvalue()}")
    return dict(json.loads(out.getvalue().replace(_mounts().name, _MOUNTS)))


@cache
def settings_of(scenario: str) -> dict[str, dict[str, Any]]:
    """Maps a service to the settings that a scenario gives it."""
    return {name: check(name, one) for name, one in containers(rendered(scenario)).items()}


def _file_of(flag: str) -> str:
    """Returns a text that the service takes for the file of this flag."""
    files = {"cert-file": "tls.crt", "key-file": "tls.key", "ca-file": "ca.crt"}
    match flag.removeprefix("--").split("-", 1):
        case ["tls" | "https", name]:
            return (_certificate() / files[name]).read_text("utf-8")
        case ["api", "key-file"]:
            return _KEY_FILE
        case ["model", "rules-file"]:
            return ""
    return SECRET


@cache
def _certificate() -> Path:
    return Authority(Path(_mounts().name) / "authority").service("of-all")


@cache
def _mounts() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _with_key_files(arguments: list[str]) -> list[str]:
    """Services read their files at once, so each gets one where its mount would be."""
    for text in arguments:
        flag, _, path = text.partition("=")
        if path.startswith(f"{_MOUNTS}/"):
            file = Path(path.replace(_MOUNTS, _mounts().name))
            file.parent.mkdir(exist_ok=True)
            file.write_text(_file_of(flag), encoding="utf-8")
    return [text.replace(f"={_MOUNTS}/", f"={_mounts().name}/") for text in arguments]
