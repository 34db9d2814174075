"""Builds what a container runs, as a process of this machine: arguments and environment.

1. environment: of the image, envFrom, env; `$(NAME)` is replaced by what came before
2. command and arguments; `$(NAME)` is replaced
3. what only a container has is replaced by what this machine has instead:
   mount paths by folders, Services' names by their addresses (where there is no DNS), all addresses
   (0.0.0.0) by the pod's one, and programs of the image by those of this environment
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kubernetes_stand_in import dns_server
from tests.kubernetes_stand_in.field_path import read_field
from tests.kubernetes_stand_in.machine import Machine
from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_files import MountError, MountPaths, object_data
from tests.kubernetes_stand_in.resources import Object

_SOURCE = Path(__file__).resolve().parents[2]
_IMAGE_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": f"{_SOURCE}:{_SOURCE / 'proto'}:{_SOURCE / 'kernels'}",
    "OMP_NUM_THREADS": "1",
}
_ENTRYPOINT = ["tandem"]
_EVERY_ADDRESS = re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])")


@dataclass(frozen=True, slots=True)
class Command:
    """Describes a process. `resolv_conf`: a file to see as /etc/resolv.conf; empty: this machine's
    own.
    """

    argv: list[str]
    env: dict[str, str]
    resolv_conf: str = ""


class CommandBuilder:
    """Builds commands for the containers of one pod, which has its address already."""

    def __init__(self, store: ObjectStore, pod: Object, folder: Path, machine: Machine) -> None:
        self._store = store
        self._pod = pod
        self._machine = machine
        self._resolv_conf = folder / "resolv.conf"
        self._namespace = pod["metadata"]["namespace"]
        self._addresses: dict[str, str] = {}
        if machine.has_dns:
            text = dns_server.resolv_conf(store.network.dns, self._namespace)
            self._resolv_conf.write_text(text)
        else:
            self._addresses = self._service_addresses()

    def build(self, container: Object, mounts: MountPaths) -> Command:
        """Raises `MountError` when something that is named is not there."""
        written = self._env(container)
        argv = [*container.get("command", _ENTRYPOINT), *container.get("args", ())]
        argv = [self._localize(_expand(part, written), mounts) for part in argv]
        env = {name: self._localize(value, mounts) for name, value in written.items()}
        return Command(
            _program(argv),
            {**_IMAGE_ENV, **self._machine.api_env, **env},
            str(self._resolv_conf) if self._machine.has_dns else "",
        )

    def exec_argv(self, container: Object, command: list[str], mounts: MountPaths) -> list[str]:
        """Returns the command of a probe or hook: `$(NAME)` is not replaced there."""
        return _program([self._localize(part, mounts) for part in command])

    # Environment -------------------------------------------------------------------------------

    def _env(self, container: Object) -> dict[str, str]:
        env: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            env |= self._all_of(source)
        for entry in container.get("env", ()):
            value = self._value(container, entry)
            if value is not None:
                env[entry["name"]] = _expand(value, env)
        return env

    def _value(self, container: Object, entry: dict[str, Any]) -> str | None:
        source = entry.get("valueFrom")
        if source is None:
            return str(entry.get("value", ""))
        if "fieldRef" in source:
            return read_field(self._pod, source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            path = source["resourceFieldRef"]["resource"].split(".")
            return str(container.get("resources", {}).get(path[0], {}).get(path[1], ""))
        kind, ref = _reference(source)
        content = self._content(kind, ref)
        if content is None or ref["key"] not in content:
            if ref.get("optional"):
                return None
            raise MountError(f"{kind} {ref['name']} has no {ref['key']}")
        return content[ref["key"]].decode()

    def _all_of(self, source: dict[str, Any]) -> dict[str, str]:
        kind = "ConfigMap" if "configMapRef" in source else "Secret"
        ref = source.get("configMapRef") or source["secretRef"]
        content = self._content(kind, ref)
        if content is None and not ref.get("optional"):
            raise MountError(f"{kind} {ref['name']} not found")
        prefix = source.get("prefix", "")
        return {prefix + name: value.decode() for name, value in (content or {}).items()}

    def _content(self, kind: str, ref: dict[str, Any]) -> dict[str, bytes] | None:
        obj = self._store.find(kind, self._namespace, ref["name"])
        return None if obj is None else object_data(obj)

    # This machine ------------------------------------------------------------------------------

    def _service_addresses(self) -> dict[str, str]:
        found = {}
        for service in self._store.list_kind("Service"):
            address = service["spec"].get("clusterIP", "None")
            if address != "None":
                name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
                if namespace == self._namespace:
                    found[name] = address
                found[f"{name}.{namespace}"] = address
        return found

    def _localize(self, text: str, mounts: MountPaths) -> str:
        text = mounts.translate(text)
        text = _EVERY_ADDRESS.sub(self._pod["status"]["podIP"], text)
        for name, address in self._addresses.items():
            host = rf"(?<![\w.-]){re.escape(name)}(\.svc(\.[a-z.]+)?)?(?=[:/])"
            text = re.sub(host, address, text)
        return text


def _reference(source: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if "configMapKeyRef" in source:
        return "ConfigMap", source["configMapKeyRef"]
    return "Secret", source["secretKeyRef"]


def _expand(text: str, env: dict[str, str]) -> str:
    """Expands `$(NAME)` of a known name; `$$(NAME)` stands for itself."""

    def value(found: re.Match[str]) -> str:
        if found[0].startswith("$$"):
            return found[0][1:]
        return env.get(found[1], found[0])

    return re.sub(r"\$?\$\(([A-Za-z_][\w.-]*)\)", value, str(text))


def _program(argv: list[str]) -> list[str]:
    """Programs of the image are those of the environment that runs the tests."""
    name = Path(argv[0]).name
    if name == "tandem":
        return [sys.executable, "-m", "cli", *argv[1:]]
    if name in ("python", "python3"):
        return [sys.executable, *argv[1:]]
    return [shutil.which(name) or argv[0], *argv[1:]]
