"""Makes a release of the commit that is checked out: `make release`, `make release DRY_RUN=1`.

    1. preflight     one version everywhere, a dated entry in CHANGELOG.md, a clean tree, the tag
    2. artifacts     wheel, source, bills of materials, chart, SHA256SUMS, into --out
    3. publish       images for both architectures, chart, signatures, to --registry
    4. keep          chart and wire, for tests that upgrade from them: tests/helm/releases/charts/,
                     tests/release/wire/

A dry run does 1 and 2, says what 1 would refuse, prints the commands of 3 and names each tool that
is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from release import ROOT
from release.artifacts import chart_name, make_bills, make_chart, make_wheel, write_sums
from release.bases import digest_of, inspect, pinned
from release.kept_chart import keep as keep_chart
from release.kept_wire import keep as keep_wire
from release.preflight import commit_time, head, problems
from release.publish import Target, publish
from release.tools import Command, ToolFailed, ToolMissing, missing, run

NEEDED = ("git", "helm", "helm push", "docker buildx", "cosign")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if not arguments.dry_run and not arguments.registry:
        print("release: --registry HOST[/PATH] says where images and chart go", file=sys.stderr)
        return 2
    try:
        return _release(arguments)
    except (ToolMissing, ToolFailed) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dry-run", action="store_true", help="push and sign nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for all files")
    parser.add_argument("--registry", help="host and path that images and chart are pushed to")
    parser.add_argument("--builder", default="tandem-release", help="buildx's builder")
    parser.add_argument("--cosign-key", help="a key file or KMS address; keyless without")
    parser.add_argument("--gpg-key", help="name of the key that signs the chart's .prov file")
    parser.add_argument("--keyring", help="GnuPG keyring (old format) that has that key")
    return parser


def _release(arguments: argparse.Namespace) -> int:
    dry: bool = arguments.dry_run
    found = problems(must_be_tagged=not dry)
    for problem in found:
        print(f"{'would refuse' if dry else 'release'}: {problem}", file=sys.stderr)
    lacking = missing(NEEDED)
    for tool, cure in lacking.items():
        print(f"missing: {tool} (install {cure})", file=sys.stderr)
    if not dry and (found or lacking):
        return 1
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for path in _artifacts(arguments, out):
        print(f"made: {path.name}")
    registry = arguments.registry or "registry.example.com"
    target = Target(registry, out, head(), commit_time(), arguments.builder, arguments.cosign_key)
    _, tag, digest = base = pinned((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    if dry:
        _show(inspect(f"{base[0]}:{tag}@{digest}"))
        publish(target, _show)
        return 0
    digest_of(f"{base[0]}:{tag}@{digest}", run)
    for name, pushed in publish(target, run).items():
        print(f"pushed: {name} {pushed}")
    for path in (keep_chart(out / chart_name()), keep_wire()):
        print(f"kept: {path}; commit it")
    return 0


def _artifacts(arguments: argparse.Namespace, out: Path) -> list[Path]:
    signing = []
    if arguments.gpg_key:
        signing = ["--sign", "--key", arguments.gpg_key]
        signing += ["--keyring", arguments.keyring] if arguments.keyring else []
    epoch = commit_time()
    files = [*make_wheel(out, epoch), *make_bills(out, epoch)]
    # Without Helm only a dry run gets here, which makes what it can.
    files += make_chart(out, signing, run) if not missing(["helm"]) else []
    return [*files, write_sums(out, files)]


def _show(command: Command) -> str:
    print(f"would run: {command}")
    return ""


if __name__ == "__main__":
    sys.exit(main())
