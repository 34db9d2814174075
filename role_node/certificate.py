"""Says whether a node's certificate lets it be prefill and decode.

Peers read a node's role from its certificate, and a change of roles changes no certificate. So one
must name both roles; of `address` identity it may name none, as that node may act in any.
"""

from __future__ import annotations

from edge.security.config import Role, SecurityError, roles_of
from edge.security.credentials import Credentials

_BOTH = (Role.PREFILL, Role.DECODE)


def certificate_obstacle(credentials: Credentials) -> str:
    """Returns why peers would refuse the node in one of its roles; empty: they would not. The
    certificate is read again, as it may have been renewed."""
    try:
        names = credentials.own_names()
    except SecurityError as error:
        return str(error)
    roles = roles_of(names or ())
    is_needed = credentials.config.tls_identity == "role"
    if names is None or roles.issuperset(_BOTH) or not (roles or is_needed):
        return ""
    found = " and ".join(sorted(role.certificate_name for role in roles)) or "no role"
    return (
        f"this node's certificate ({credentials.config.tls_cert_file}) names {found}, and peers "
        "would refuse it after a change of roles: give it one with the DNS names "
        f"{' and '.join(role.certificate_name for role in _BOTH)}"
    )
