"""Knows who asks, and whether their Roles allow it.

Service accounts have tokens of the stand-in's own making (`token_of`). Only namespaced Roles
count, because the chart uses no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.kubernetes_stand_in.api_errors import Forbidden, Unauthorized
from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.resources import Target

_PREFIX = "stand-in"


@dataclass(frozen=True, slots=True)
class User:
    """`account` is empty for the administrator."""

    namespace: str = ""
    account: str = ""

    @property
    def name(self) -> str:
        return f"{self.namespace}:{self.account}" if self.account else "admin"


def token_of(namespace: str, account: str) -> str:
    return f"{_PREFIX}.{namespace}.{account}"


def authenticate(store: ObjectStore, authorization: str) -> User:
    """Raises `Unauthorized` for a token of no account that exists."""
    if not authorization:
        return User()
    token = authorization.removeprefix("Bearer ")
    prefix, namespace, account = [*token.split(".", 2), "", ""][:3]
    if prefix != _PREFIX or store.find("ServiceAccount", namespace, account) is None:
        raise Unauthorized("unknown token")
    return User(namespace, account)


def authorize(store: ObjectStore, user: User, verb: str, target: Target) -> None:
    """Allows the request or raises `Forbidden`."""
    if not user.account:
        return
    if any(_allows(rule, verb, target) for rule in _rules(store, user, target.namespace)):
        return
    raise Forbidden(
        f'{target.resource.plural} is forbidden: User "system:serviceaccount:{user.name}" cannot '
        f'{verb} resource "{target.resource.plural}" in API group "{target.resource.group}" in the '
        f'namespace "{target.namespace}"'
    )


def _rules(store: ObjectStore, user: User, namespace: str) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = []
    for binding in store.list_kind("RoleBinding", namespace) if namespace else ():
        if any(_is_user(subject, user, namespace) for subject in binding.get("subjects", ())):
            role = store.find("Role", namespace, binding["roleRef"]["name"])
            rules += (role or {}).get("rules", ())
    return rules


def _is_user(subject: dict[str, Any], user: User, namespace: str) -> bool:
    named = (subject["kind"], subject.get("namespace", namespace), subject["name"])
    return named == ("ServiceAccount", user.namespace, user.account)


def _allows(rule: dict[str, Any], verb: str, target: Target) -> bool:
    resource = target.resource.plural + (f"/{target.subresource}" if target.subresource else "")
    return (
        _has(rule.get("verbs"), verb)
        and _has(rule.get("apiGroups"), target.resource.group)
        and _has(rule.get("resources"), resource)
        and (not rule.get("resourceNames") or target.name in rule["resourceNames"])
    )


def _has(allowed: list[str] | None, wanted: str) -> bool:
    return wanted in (allowed or ()) or "*" in (allowed or ())
