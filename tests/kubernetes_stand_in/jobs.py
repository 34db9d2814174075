"""Job: a pod that must end well once, and is tried again `backoffLimit` times."""

from __future__ import annotations

from typing import Any

from tests.kubernetes_stand_in.object_store import ObjectStore, now
from tests.kubernetes_stand_in.pod_state import is_terminating, phase
from tests.kubernetes_stand_in.pod_template import is_active, make_pod, pods_of, set_status
from tests.kubernetes_stand_in.resources import Object


def reconcile_jobs(store: ObjectStore) -> None:
    for job in store.list_kind("Job"):
        if not is_terminating(job) and not _is_finished(job):
            _reconcile(store, job)


def _is_finished(job: Object) -> bool:
    return bool(job.get("status", {}).get("conditions"))


def _reconcile(store: ObjectStore, job: Object) -> None:
    pods = pods_of(store, job)
    succeeded = sum(phase(pod) == "Succeeded" for pod in pods)
    failed = sum(phase(pod) == "Failed" for pod in pods)
    active = sum(map(is_active, pods))
    wanted = job["spec"].get("completions", 1)
    is_failed = failed > job["spec"].get("backoffLimit", 6)
    if succeeded < wanted and not is_failed and not active:
        store.create(make_pod(job, job["spec"]["template"]))
        active = 1
    status: dict[str, Any] = {"active": active, "succeeded": succeeded, "failed": failed}
    if succeeded >= wanted:
        status["conditions"] = [_condition("Complete")]
        status["completionTime"] = now()
    elif is_failed:
        status["conditions"] = [_condition("Failed")]
    set_status(store, job, status)


def _condition(type_: str) -> dict[str, str]:
    return {"type": type_, "status": "True", "lastTransitionTime": now()}
