"""The volumes of a pod as folders of this machine.

A container sees them at their mount paths; a process here sees the folders themselves. So every
mount path in what the chart wrote (arguments, environment, configuration files) is replaced by the
folder (`MountPaths.translate`). Folders live as long as the pod, except claims and host paths.
"""

from __future__ import annotations

import base64
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from tests.kubernetes_stand_in import rbac
from tests.kubernetes_stand_in.field_path import read_field
from tests.kubernetes_stand_in.machine import Machine
from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.resources import Object

TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


_WRITTEN = {"configMap", "secret", "projected", "downwardAPI"}
"""Volumes whose files a kubelet writes, and writes again when what they show has changed."""
_DATA = "..data"


class MountError(Exception):
    """A volume that cannot be had: the pod waits, as with a real kubelet."""


class MountPaths:
    """Container path to host folder."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        names = sorted(map(re.escape, folders), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w./-])({'|'.join(names)})(?![\w.-])")

    def translate(self, text: str) -> str:
        if not self._folders:
            return text
        return self._pattern.sub(lambda found: str(self._folders[found[1]]), text)


class PodFiles:
    """`prepare` makes all volumes; `mounts` says where a container finds them."""

    def __init__(self, store: ObjectStore, pod: Object, folder: Path, machine: Machine) -> None:
        self._store = store
        self._pod = pod
        self._folder = folder
        self._machine = machine

    def prepare(self) -> None:
        """Raises `MountError`, and can then be called again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for volume in self._pod["spec"].get("volumes", ()):
            self._prepare(volume)
        if self._wants_token():
            files = {
                "token": self._token(),
                "ca.crt": self._machine.ca.encode(),
                "namespace": self._namespace.encode(),
            }
            _write(self._folder / "serviceaccount", files)

    def refresh(self) -> None:
        """Brings what is written for the pod up to date, all files of a volume at once. Raises
        `MountError`."""
        for volume in self._pod["spec"].get("volumes", ()):
            place = self._place(volume)
            if volume.keys() & _WRITTEN and place.exists():
                _publish(place, self._written(volume))

    def mounts(self, container: Object) -> MountPaths:
        volumes = {v["name"]: v for v in self._pod["spec"].get("volumes", ())}
        folders: dict[str, Path] = {}
        for mount in container.get("volumeMounts", ()):
            folder = self._place(volumes[mount["name"]])
            folders[mount["mountPath"].rstrip("/")] = folder / mount.get("subPath", "")
        if self._wants_token():
            folders.setdefault(TOKEN_FOLDER, self._folder / "serviceaccount")
        return MountPaths(folders)

    # Inside ------------------------------------------------------------------------------------

    @property
    def _namespace(self) -> str:
        return str(self._pod["metadata"]["namespace"])

    def _token(self) -> bytes:
        account = self._pod["spec"].get("serviceAccountName", "default")
        return rbac.token_of(self._namespace, account).encode()

    def _wants_token(self) -> bool:
        spec = self._pod["spec"]
        if "automountServiceAccountToken" in spec:
            return bool(spec["automountServiceAccountToken"])
        account = self._store.find(
            "ServiceAccount", self._namespace, spec.get("serviceAccountName", "default")
        )
        return bool((account or {}).get("automountServiceAccountToken", account is not None))

    def _place(self, volume: dict[str, Any]) -> Path:
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            return self._machine.claims / str(volume["persistentVolumeClaim"]["claimName"])
        return self._folder / "volumes" / str(volume["name"])

    def _prepare(self, volume: dict[str, Any]) -> None:
        place = self._place(volume)
        if "hostPath" in volume:
            if not place.exists():
                raise MountError(f"hostPath {place} does not exist")
        elif volume.keys() & _WRITTEN:
            _publish(place, self._written(volume))
        elif volume.keys() & {"emptyDir", "persistentVolumeClaim"}:
            place.mkdir(parents=True, exist_ok=True)
        else:
            raise MountError(f"volume {volume} is of a kind that is not supported here")

    def _written(self, volume: dict[str, Any]) -> dict[str, bytes]:
        if "configMap" in volume:
            return self._objects_files("ConfigMap", volume["configMap"], "name")
        if "secret" in volume:
            return self._objects_files("Secret", volume["secret"], "secretName")
        if "downwardAPI" in volume:
            return self._downward(volume["downwardAPI"])
        files: dict[str, bytes] = {}
        for source in volume["projected"]["sources"]:
            files |= self._projected(source)
        return files

    def _projected(self, source: dict[str, Any]) -> dict[str, bytes]:
        if "configMap" in source:
            return self._objects_files("ConfigMap", source["configMap"], "name")
        if "secret" in source:
            return self._objects_files("Secret", source["secret"], "name")
        if "downwardAPI" in source:
            return self._downward(source["downwardAPI"])
        return {source["serviceAccountToken"]["path"]: self._token()}

    def _objects_files(self, kind: str, source: dict[str, Any], key: str) -> dict[str, bytes]:
        obj = self._store.find(kind, self._namespace, source[key])
        if obj is None:
            if source.get("optional"):
                return {}
            raise MountError(f"{kind} {source[key]} not found")
        content = object_data(obj)
        if "items" not in source:
            return content
        try:
            return {item["path"]: content[item["key"]] for item in source["items"]}
        except KeyError as missing:
            raise MountError(f"{kind} {source[key]} has no key {missing}") from None

    def _downward(self, source: dict[str, Any]) -> dict[str, bytes]:
        return {
            item["path"]: read_field(self._pod, item["fieldRef"]["fieldPath"]).encode()
            for item in source["items"]
        }


def object_data(obj: Object) -> dict[str, bytes]:
    """Returns what a ConfigMap or Secret holds."""
    binary = obj.get("data") if obj["kind"] == "Secret" else obj.get("binaryData")
    files = {name: base64.b64decode(value) for name, value in (binary or {}).items()}
    if obj["kind"] == "ConfigMap":
        files |= {name: text.encode() for name, text in (obj.get("data") or {}).items()}
    return files


def _publish(folder: Path, files: dict[str, bytes]) -> None:
    """Writes files as a kubelet does, so that all of them change in one moment: each is a link
    through `..data`, which is turned to a new folder."""
    data = folder / _DATA
    old = data.resolve() if data.is_symlink() else None
    if old is not None and _read(old) == files:
        return
    new = folder / f"..{uuid.uuid4().hex}"
    _write(new, files)
    turned = folder / "..data_tmp"
    turned.symlink_to(new.name)
    turned.replace(data)
    names = {name.partition("/")[0] for name in files}
    for name in names:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"{_DATA}/{name}")
    for link in folder.iterdir():
        if not link.name.startswith("..") and link.name not in names:
            link.unlink()
    if old is not None:
        shutil.rmtree(old)


def _read(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    folder.mkdir(parents=True, exist_ok=True)
