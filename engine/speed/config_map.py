"""Writes into a ConfigMap of this pod's namespace, by the Kubernetes API.

The ConfigMap exists already, so the pod's service account needs `patch` of that one and nothing
else.
"""

from __future__ import annotations

import json
import logging
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_URL = "https://kubernetes.default.svc"
_TIMEOUT_S = 30
_PAUSES_S = (1.0, 4.0, 16.0, 60.0)
"""They lie between tries while the API is away or busy: what is written was measured for minutes
on GPUs. To set the same keys twice does no harm."""
_BUSY = 429


class ClusterError(Exception):
    """The Kubernetes API cannot be reached, or refuses; the message says what to do."""


class ClusterAway(ClusterError):
    """It may answer a moment later."""


def write_config_map(
    name: str, data: Mapping[str, str], account: Path = _ACCOUNT, url: str = _URL
) -> None:
    """Sets keys of the ConfigMap; others stay. Raises `ClusterError`."""
    for pause_s in _PAUSES_S:
        try:
            return _patch(name, data, account, url)
        except ClusterAway as error:
            logger.warning("%s; trying again in %g s", error, pause_s)
            time.sleep(pause_s)
    return _patch(name, data, account, url)


def _patch(name: str, data: Mapping[str, str], account: Path, url: str) -> None:
    """Does the same once, with the token of now. Raises `ClusterError`."""
    try:
        namespace = (account / "namespace").read_text().strip()
        token = (account / "token").read_text().strip()
        trust = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as error:
        raise ClusterError(
            f"--config-map is for pods of Kubernetes that have a service account's token "
            f"({account}: {error.strerror}): set automountServiceAccountToken"
        ) from None
    request = urllib.request.Request(
        f"{url}/api/v1/namespaces/{namespace}/configmaps/{name}",
        data=json.dumps({"data": dict(data)}).encode(),
        headers={
            "authorization": f"Bearer {token}",
            "content-type": "application/merge-patch+json",
        },
        method="PATCH",
    )
    # The API is in the cluster, where a proxy for the hub (HTTPS_PROXY) is of no use.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
    )
    try:
        with opener.open(request, timeout=_TIMEOUT_S):
            pass
    except urllib.error.HTTPError as error:
        kind = ClusterAway if error.code == _BUSY or error.code >= 500 else ClusterError
        raise kind(
            f"Kubernetes answered {error.code} to a patch of the ConfigMap {name} in {namespace}: "
            "it must exist, and the pod's service account may patch it"
        ) from None
    except OSError as error:
        raise ClusterAway(f"the Kubernetes API cannot be reached: {error}") from None
