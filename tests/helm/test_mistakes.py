"""Values that cannot work fail before anything is installed, with the cure in the message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate_values_schema import CHART
from engine.models.checkpoint import _name_of
from tests.helm.helm_engine import HelmCli, HelmError, HelmSdk
from tests.helm.scenarios import overlay
from tests.helm.service_settings import containers

MINIMAL: dict[str, Any] = {"model": {"name": "org/model"}}
ONE_CLAIM = {"storage": {"type": "pvc", "pvc": {"accessModes": ["ReadWriteOnce"]}}}
FILLS = [{"name": "models", "mountPath": "/models"}]
ADAPTERS = {"enabled": True, "volume": {"claim": "adapters"}}

BETWEEN_VALUES = [
    ({"model": {"name": ""}}, "set it to a name on the hub"),
    ({"fullnameOverride": "7b"}, "and a letter first: set fullnameOverride"),
    (
        {"model": {"revision": "v1", "storage": {"type": "hostPath", "path": "m"}}},
        "model.revision is of a model on the hub",
    ),
    ({"model": {"storage": {"path": "x"}}}, "set model.storage.type to pvc, hostPath or image"),
    (
        {
            "model": {"storage": {"path": "x"}},
            "decode": {"initContainers": [{"name": "fetch", "image": "i", "volumeMounts": FILLS}]},
        },
        "let one of prefill.initContainers mount the volume models",
    ),
    (
        {
            "model": {"hub": {"offline": True}},
            "decode": {"initContainers": [{"name": "fetch", "image": "i", "volumeMounts": FILLS}]},
        },
        "model.hub.offline is true, but an emptyDir starts empty: let one of prefill.init",
    ),
    ({"model": {"storage": {"type": "hostPath"}}}, "set model.storage.hostPath.path"),
    ({"model": {"storage": {"type": "image"}}}, "set model.storage.image.reference"),
    ({"model": ONE_CLAIM}, "2 pods share one claim"),
    (
        {"model": {"storage": {"type": "pvc", "pvc": {"accessModes": ["ReadOnlyMany"]}}}},
        "nothing can be downloaded",
    ),
    (
        {"decode": {"ports": {"grpc": 8100}}},
        "decode.ports.grpc and decode.ports.http are both 8100",
    ),
    (
        {"prefill": {"ports": {"kv": 8098}}},
        "prefill.ports.metrics (8101) is one of the ports 8098 to 8105",
    ),
    (
        {"prefill": {"ports": {"kv": 8199}, "settings": {"kvProcesses": 2}}},
        "prefill.ports.grpc (8200) is one of the ports 8199 to 8200",
    ),
    (
        {"decode": {"settings": {"kvSharePrefixes": "auto"}}},
        "set decode.settings.enablePrefixCaching to true",
    ),
    (
        {
            "decode": {
                "ports": {"kv": 8098},
                "settings": {"kvSharePrefixes": "auto", "enablePrefixCaching": True},
            }
        },
        "decode.ports.http (8100) is one of the ports 8098 to 8105",
    ),
    (
        {"node": {"replicas": 1}, "tierDefaults": {"parallelism": {"hosts": 2}}},
        "node.parallelism.hosts is 2, but nodes that change their role have one",
    ),
    (
        {"node": {"replicas": 1, "parallelism": {"pipeline": 2}}},
        "node.parallelism.pipeline is 2, but nodes that change their role have one",
    ),
    (
        {"node": {"replicas": 1, "autoscaling": {"kind": "hpa"}}},
        "node.autoscaling.kind is hpa, but pods of node are of two kinds",
    ),
    (
        {
            "node": {"replicas": 1},
            "decode": {"autoscaling": {"kind": "hpa", "metric": "slo"}},
            "router": {"settings": {"sloItlMs": 50}},
        },
        "decode.autoscaling.metric is slo, whose number has the pods of node in it",
    ),
    (
        {
            "node": {"replicas": 1},
            "tierDefaults": {
                "settings": {
                    "speculativeConfig": '{"method": "ngram", "num_speculative_tokens": 2}'
                }
            },
        },
        "node.settings.speculativeConfig is set, which nodes that change their role refuse",
    ),
    (
        {
            "node": {"replicas": 1},
            "inferencePool": {"enabled": True, "endpointPicker": {"name": "p"}},
        },
        "a label of their pods, which does not follow a role: set node.replicas to 0",
    ),
    (
        {"node": {"replicas": 1}, "tierDefaults": {"network": {"hostNetwork": True}}},
        "decode.ports.http and node.ports.http are both 8100",
    ),
    (
        {
            "node": {"replicas": 1, "ports": {"http": 1, "grpc": 2, "metrics": 3, "kv": 8098}},
            "tierDefaults": {"network": {"hostNetwork": True}},
        },
        "decode.ports.http (8100) is one of the ports 8098 to 8105, which KV transfer of node",
    ),
    (
        {
            "tierDefaults": {"network": {"hostNetwork": True}},
            "prefill": {"ports": {"grpc": 8502, "metrics": 8503}},
            "decode": {"settings": {"kvSharePrefixes": "auto", "enablePrefixCaching": True}},
        },
        "prefill.ports.grpc (8502) is one of the ports 8500 to 8507, which KV transfer of decode",
    ),
    (
        {
            "node": {"replicas": 1},
            "tls": {
                "mode": "existingSecret",
                "existingSecret": {"router": "r", "prefill": "p", "decode": "d"},
            },
        },
        "set tls.existingSecret.node to a Secret with tls.crt, tls.key and ca.crt, whose "
        "certificate names tandem-prefill and tandem-decode",
    ),
    (
        {
            "calibration": {"enabled": True},
            "decode": {"parallelism": {"hosts": 2, "tensor": 2}},
            "model": {"storage": {"type": "pvc"}},
        },
        "calibration.enabled measures a node of one host",
    ),
    (
        {"calibration": {"enabled": True, "output": "claim"}},
        "calibration.output is claim: set calibration.existingClaim",
    ),
    (
        {
            "calibration": {"enabled": True},
            "rbac": {"create": False},
            "router": {"discovery": {"type": "dns"}},
        },
        "so the calibration may not write its ConfigMap: set calibration.output to claim",
    ),
    (
        {"jobs": {"podLabels": {"app.kubernetes.io/name": "x"}}},
        "jobs.podLabels sets app.kubernetes.io/name, which is the chart's own",
    ),
    ({"prefill": {"kvTiers": {"diskGiB": 9}}}, "diskGiB needs prefill.kvTiers.hostGiB"),
    (
        {"decode": {"kvTiers": {"hostGiB": 9}}},
        "set decode.settings.enablePrefixCaching to true",
    ),
    (
        {"prefill": {"kvTiers": {"hostGiB": 9}, "settings": {"enablePrefixCaching": False}}},
        "set prefill.settings.enablePrefixCaching to true",
    ),
    (
        {"prefill": {"kvTiers": {"hostGiB": 1, "diskGiB": 9, "disk": {"type": "hostPath"}}}},
        "say where in prefill.kvTiers.disk.hostPath",
    ),
    (
        {"model": {"adapters": {"enabled": True}}},
        "say in model.adapters.volume.claim where the adapters are",
    ),
    (
        {"model": {"adapters": ADAPTERS | {"loadable": False}}},
        "there would never be an adapter",
    ),
    (
        {"model": {"adapters": ADAPTERS | {"maxCpuLoras": 2}}},
        "maxCpuLoras (2) is less than maxLoras (8)",
    ),
    (
        {"model": {"adapters": ADAPTERS}, "prefill": {"parallelism": {"pipeline": 2}}},
        "model.adapters does not work with prefill.parallelism.pipeline",
    ),
    (
        {"model": {"adapters": ADAPTERS}, "decode": {"settings": {"maxLoras": 4}}},
        "decode.settings.maxLoras is said by model.adapters",
    ),
    (
        {"prefill": {"ports": {"kv": 65535}}},
        "needs the ports up to 65542",
    ),
    (
        {"decode": {"resources": {"limits": {"nvidia.com/gpu": 2}}}},
        "follows from decode.parallelism: remove it",
    ),
    (
        {"prefill": {"resources": {"requests": {"nvidia.com/gpu": 2}}}},
        "prefill.resources.requests counts nvidia.com/gpu",
    ),
    ({"rbac": {"create": False}}, "router.discovery.type to dns"),
    (
        {"decode": {"parallelism": {"tensor": 3, "hosts": 2}}},
        "cannot be spread evenly over 2 hosts",
    ),
    (
        {"prefill": {"parallelism": {"tensor": 2, "pipeline": 3, "hosts": 4}}},
        "3 stages of 2 ranks cannot be spread evenly over 4 hosts",
    ),
    (
        {"tierDefaults": {"parallelism": {"pipeline": 2}}},
        "decode.parallelism.pipeline (2) is for prefill nodes",
    ),
    (
        {"decode": {"parallelism": {"data": 2, "tensor": 2, "hosts": 2}}},
        "decode.parallelism.data (2) is for nodes on one host, without stages",
    ),
    ({"decode": {"parallelism": {"tensor": 2, "hosts": 2}}}, "an emptyDir is one pod's"),
    (
        {
            "decode": {"parallelism": {"tensor": 2, "hosts": 2}},
            "model": {"storage": {"type": "hostPath", "hostPath": {"path": "/m"}}},
        },
        "which every host must have",
    ),
    ({"decode": {"topology": {"groupKey": "k"}}}, "raise decode.parallelism.hosts"),
    ({"prefill": {"topology": {"colocateRequired": True}}}, "needs prefill.topology.colocateKey"),
    (
        {"prefill": {"topology": {"colocateKey": "zone"}, "affinity": {"podAffinity": {}}}},
        "set one of them",
    ),
    (
        {"decode": {"autoscaling": {"kind": "hpa", "minReplicas": 5}}},
        "minReplicas (5) is more than maxReplicas (4)",
    ),
    ({"decode": {"autoscaling": {"kind": "hpa", "target": 80}}}, "kvUtilization is a part of 1"),
    ({"decode": {"autoscaling": {"kind": "hpa", "metric": "slo"}}}, "set router.settings.sloItlMs"),
    (
        {"prefill": {"autoscaling": {"kind": "hpa", "minReplicas": 0}}},
        "prefill can go to zero, with kind keda and metric slo",
    ),
    ({"prefill": {"autoscaling": {"kind": "keda"}}}, "set monitoring.prometheusUrl"),
    (
        {"monitoring": {"prometheusTrigger": {"metadata": {"query": "up"}}}},
        "prometheusTrigger.metadata has query, which the chart sets",
    ),
    (
        {"router": {"autoscaling": {"kind": "hpa"}, "resources": {"requests": None}}},
        "set router.resources.requests.cpu",
    ),
    ({"decode": {"strategy": {"maxUnavailable": 0}}}, "no rollout can begin"),
    ({"router": {"strategy": {"maxSurge": "0%"}}}, "no rollout can begin"),
    (
        {"decode": {"env": [{"name": "TANDEM_PORT", "value": "1"}]}},
        "write it as a value below decode.settings",
    ),
    (
        {"router": {"podLabels": {"app.kubernetes.io/component": "x"}}},
        "which is the chart's own",
    ),
    ({"commonLabels": {"app.kubernetes.io/version": "2"}}, "which is the chart's own"),
    ({"decode": {"drain": {"drainSeconds": 600}}}, "raise router.drain.drainSeconds"),
    ({"router": {"discovery": {"type": "static"}}}, "list the decode nodes"),
    ({"router": {"ports": {"admin": 8000}}}, "choose two"),
    ({"router": {"discovery": {"prefill": ["a:1"]}}}, "set router.discovery.type to static"),
    (
        {"router": {"autoscaling": {"kind": "hpa", "minReplicas": 9}}},
        "minReplicas is more than maxReplicas",
    ),
    ({"router": {"service": {"nodePort": 30080}}}, "needs router.service.type NodePort"),
    ({"router": {"service": {"loadBalancerClass": "x"}}}, "type LoadBalancer"),
    ({"router": {"httpRoute": {"enabled": True}}}, "needs router.httpRoute.parentRefs"),
    ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name"),
    (
        {"inferencePool": {"enabled": True, "endpointPicker": {"name": "e"}}},
        "set prefill.ports.grpc to decode.ports.http (8100)",
    ),
    (
        {"inferencePool": {"enabled": True, "endpointPicker": {"name": "e"}}},
        "set inferencePool.gatewayShowsToken, or set auth.clusterToken.enabled to false",
    ),
    (
        {
            "inferencePool": {"enabled": True, "endpointPicker": {"name": "e"}},
            "tls": {"mode": "generated"},
        },
        "set inferencePool.gatewayShowsCertificate, or set tls.mode to none",
    ),
    (
        {
            "inferencePool": {
                "enabled": True,
                "gatewayShowsToken": True,
                "endpointPicker": {"name": "e"},
            },
            "auth": {"clusterToken": {"enabled": False}},
        },
        "auth.clusterToken.enabled is false",
    ),
    (
        {"monitoring": {"podMonitor": {"relabelings": [{"targetLabel": "release"}]}}},
        "by which alerts and scalers find a tier",
    ),
    ({"tls": {"mode": "certManager"}}, "set tls.certManager.issuerRef.name"),
    (
        {"tls": {"mode": "certManager", "certManager": {"duration": "720h"}}},
        "renewBefore (720h) must be less than duration (720h)",
    ),
    ({"tls": {"mode": "existingSecret"}}, "set tls.existingSecret.router to a Secret"),
    (
        {"tls": {"mode": "existingSecret", "existingSecret": {"router": "r", "decode": "d"}}},
        "set tls.existingSecret.prefill to a Secret",
    ),
    (
        {"tls": {"mode": "generated", "existingSecret": {"router": "r"}}},
        "set tls.mode to existingSecret",
    ),
    ({"tls": {"acceptMissing": True}}, "set tls.mode to where certificates come from"),
    ({"router": {"https": {"enabled": True}}}, "set router.https.existingSecret"),
    ({"router": {"responseStore": {"existingClaim": "c"}}}, "set router.replicas to 1"),
    (
        {"router": {"responseStore": {"existingClaim": "c", "existingSecret": "s"}}},
        "leave one out",
    ),
    ({"router": {"batchStore": {"size": "1Gi"}}}, "are a file for one router"),
    ({"router": {"batchStore": {"size": "1Gi", "existingSecret": "s"}}}, "leave one out"),
    ({"router": {"https": {"existingSecret": "s"}}}, "router.https.enabled is false"),
    (
        {"router": {"discovery": {"type": "static", "decode": ["a:1/2"]}}},
        "set auth.clusterToken.existingSecret to a Secret with theirs",
    ),
    (
        {
            "inferencePool": {"enabled": True, "endpointPicker": {"name": "e"}},
            "auth": {"nodeKey": {"enabled": True}},
        },
        "turn one off",
    ),
]

CONTAINER = {"image": "i:1"}
BETWEEN_VALUES += [
    (
        {"decode": {"extraArgs": ["--max-num-seqs=8", "--port=9"]}},
        "decode.extraArgs gives --port, which the chart sets",
    ),
    (
        {"decode": {"extraArgs": ["--max-num-seqs=1", "--max-num-seqs=2"]}},
        "decode.extraArgs gives --max-num-seqs, which the chart sets",
    ),
    (
        {"decode": {"extraArgs": ["--max-num-seq=8"]}},
        "decode.extraArgs gives --max-num-seq, which tandem decode 0.2.0 does not have, but "
        "--max-num-batched-tokens, --max-num-seqs: correct it",
    ),
    (
        {"prefill": {"extraArgs": ["--sed=1"]}},
        "prefill.extraArgs gives --sed, which tandem prefill 0.2.0 does not have: correct it, or "
        "name another version in image.engine.tag",
    ),
    ({"router": {"extraArgs": ["--tie-margins=1"]}}, "in image.router.tag"),
    ({"node": {"replicas": 1, "extraArgs": ["--xy-z=1"]}}, "tandem node 0.2.0 does not have"),
    ({"decode": {"extraArgs": ["--check"]}}, "tandem decode 0.2.0 does not have"),
    ({"decode": {"extraArgs": ["--block-size"]}}, "without a value: write --block-size=..."),
    (
        {"decode": {"extraArgs": ["--enforce-eager=true"]}},
        "which takes no value: write --enforce-eager, or --no-...",
    ),
    (
        {"calibration": {"enabled": True, "extraArgs": ["--quantisation", "fp8"]}},
        "calibration.extraArgs gives --quantisation, which tandem bench",
    ),
    (
        {"prefill": {"settings": {"enforceEager": True}, "extraArgs": ["--no-enforce-eager"]}},
        "prefill.extraArgs gives --enforce-eager",
    ),
    ({"router": {"extraArgs": ["--admin-port=1"]}}, "router.extraArgs gives --admin-port"),
    (
        {"router": {"extraContainers": [{"name": "router", **CONTAINER}]}},
        "a container called router",
    ),
    (
        {"decode": {
            "sidecars": [{"name": "a", **CONTAINER}],
            "extraContainers": [{"name": "a", **CONTAINER}],
        }},
        "decode.extraContainers has a container called a",
    ),
    (
        {"decode": {"network": {"kvHost": "network:fabric/rail0"}}},
        "set decode.network.networks",
    ),
    (
        {"prefill": {"network": {"kvHost": "network:a/b", "networks": "a/b", "hostNetwork": True}}},
        "name an interface (interface:NAME)",
    ),
    (
        {"prefill": {
            "network": {"networks": "a/b"},
            "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "a/c"},
        }},
        "keep one of them",
    ),
    (
        {"tierDefaults": {"network": {"hostNetwork": True}}},
        "prefill.ports.grpc and decode.ports.grpc are both 8200",
    ),
    (
        {
            "tierDefaults": {"network": {"hostNetwork": True}},
            "prefill": {"ports": {"grpc": 8300, "metrics": 8301, "kv": 8098}},
        },
        "decode.ports.metrics (8101) is one of the ports 8098 to 8105",
    ),
    (
        {"decode": {
            "network": {"rdma": {"rdma/hca": 1}}, "resources": {"limits": {"rdma/hca": 1}},
        }},
        "decode.resources.limits counts rdma/hca",
    ),
    ({"decode": {"network": {"rdma": {"nvidia.com/gpu": 1}}}}, "which are the GPUs"),
    ({"decode": {"nccl": {"preset": "roce"}}}, "set decode.network.rdma"),
    ({"decode": {"nccl": {"preset": "tcp", "hca": "mlx5"}}}, "to infiniband or roce"),
    (
        {"decode": {"nccl": {"preset": "tcp"}, "env": [{"name": "NCCL_NET", "value": "IB"}]}},
        "decode.env has NCCL_NET, which the pod has already",
    ),
    ({"decode": {"env": [{"name": "HF_HOME", "value": "/x"}]}}, "decode.env has HF_HOME"),
    (
        {"prefill": {"extraVolumes": [{"name": "cache", "emptyDir": {}}]}},
        "prefill.extraVolumes has cache",
    ),
    (
        {"prefill": {"extraVolumeMounts": [{"name": "a", "mountPath": "/cache"}]}},
        "prefill.extraVolumeMounts has /cache, which the pod has already",
    ),
    (
        {"router": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}},
        "router.extraVolumes has tmp",
    ),
    (
        {"monitoring": {"podMonitor": {
            "relabelings": [{"action": "labeldrop", "regex": "comp.*"}],
        }}},
        "loses the label component by a labeldrop",
    ),
    (
        {"monitoring": {"podMonitor": {
            "metricRelabelings": [{"action": "labelkeep", "regex": "component|release"}],
        }}},
        "loses the label namespace by a labelkeep",
    ),
    (
        {"decode": {"resourceClaims": [{"name": "gpus", "resourceClaimName": "c"}]}},
        "decode.resourceClaims has gpus, which is taken",
    ),
    ({"scheduling": {"kind": "kueue"}}, "set scheduling.queue to a LocalQueue"),
    ({"scheduling": {"queue": "q"}}, "set it to kueue or volcano"),
    ({"kvStore": {"kind": "url"}}, "set kvStore.url to mooncake://HOST:PORT"),
    ({"kvStore": {"url": "mooncake://a:1"}}, "but kvStore.kind is none"),
    ({"kvStore": {"kind": "chart"}}, "kvStore lies behind host memory"),
    ({"scheduling": {"minMember": 2}}, "set scheduling.kind to volcano or kubernetes"),
    ({"scheduling": {"kind": "kubernetes"}}, "whose gangs there are since 1.37"),
    ({"scheduling": {"kind": "kubernetes"}}, "set scheduling.minMember to the pods"),
    ({"scheduling": {"kind": "kubernetes", "queue": "q"}}, "own scheduler has no queues"),
    (
        {"scheduling": {"kind": "kubernetes"}, "decode": {"schedulerName": "other"}},
        "decode.schedulerName is other",
    ),
    (
        {"scheduling": {"kind": "volcano", "minMember": 3}},
        "scheduling.minMember (3) is more than the 2 pods",
    ),
    (
        {"scheduling": {"kind": "volcano"}, "decode": {"schedulerName": "other"}},
        "decode.schedulerName is other",
    ),
    (
        {"model": {"preload": {"kind": "job"}}},
        "model.preload fills one volume for all pods, but model.storage.type is emptyDir",
    ),
    (
        {"model": {"preload": {"kind": "hook"}, "storage": {"type": "pvc"}}},
        "set model.storage.pvc.existingClaim, or model.preload.kind to job",
    ),
    (
        {"model": {"preload": {"kind": "job"}, "storage": {"type": "pvc", "path": "m"}}},
        "set model.preload.kind to none",
    ),
    (
        {"model": {
            "preload": {"kind": "job"}, "storage": {"type": "pvc"}, "hub": {"offline": True},
        }},
        "model.hub.offline forbids it",
    ),
    (
        {"disaggregatedSet": {"enabled": True}, "prefill": {"enabled": False}},
        "a set has at least two roles",
    ),
    (
        {"disaggregatedSet": {"enabled": True}, "prefill": {"replicas": 0}},
        "groups of all roles or of none",
    ),
    (
        {
            "disaggregatedSet": {"enabled": True},
            "scheduling": {"kind": "volcano", "minMember": 1},
        },
        "each group has a PodGroup of its operator",
    ),
    ({"compileCache": {"type": "hostPath"}}, "set compileCache.hostPath.path"),
    (
        {"compileCache": {"type": "pvc", "pvc": {"accessModes": ["ReadWriteOnce"]}}},
        "2 pods write to one claim",
    ),
]  # fmt: skip

AGAINST_THE_SCHEMA = [
    ({"replicas": 2}, "replicas"),
    ({"prefill": {"replicaCount": 2}}, "replicaCount"),
    ({"prefill": {"settings": {"maxNumSeq": 2}}}, "maxNumSeq"),
    ({"prefill": {"settings": {"maxNumSeqs": 0}}}, "maxNumSeqs"),
    ({"prefill": {"settings": {"localPrefillThreshold": 1}}}, "localPrefillThreshold"),
    ({"decode": {"enabled": False}}, "enabled"),
    ({"decode": {"settings": {"port": 1}}}, "port"),
    ({"router": {"ports": {"kv": 1}}}, "kv"),
    ({"prefill": {"ports": {"http": 1}}}, "http"),
    ({"decode": {"settings": {"allowPlaintext": True}}}, "allowPlaintext"),
    ({"tls": {"mode": "on"}}, "mode"),
    ({"decode": {"settings": {"schedulingPolicy": "lifo"}}}, "schedulingPolicy"),
    ({"router": {"settings": {"apiKeys": "secret"}}}, "apiKeys"),
    ({"image": {"engine": {"tag": "latest"}}}, "tag"),
    ({"model": {"name": "../../etc"}}, "name"),
    ({"model": {"dtype": "int3"}}, "dtype"),
    ({"model": {"kvCacheDtype": "fp8_e5m2"}}, "kvCacheDtype"),
    ({"prefill": {"shm": {"sizeLimit": "much"}}}, "sizeLimit"),
    ({"decode": {"replicas": -1}}, "replicas"),
    ({"decode": {"replicas": 1.5}}, "replicas"),
    ({"router": {"replicas": "two"}}, "replicas"),
    ({"router": {"strategy": {"maxSurge": "150%"}}}, "maxSurge"),
    ({"decode": {"pdb": {"maxUnavailable": 0}}}, "maxUnavailable"),
    ({"decode": {"pdb": {"maxUnavailable": "0%"}}}, "maxUnavailable"),
    ({"router": {"service": {"type": "NodePort", "nodePort": 80}}}, "nodePort"),
    ({"monitoring": {"prometheusRule": {"runbookUrl": "docs/operations.md"}}}, "runbookUrl"),
    ({"decode": {"tolerations": [{"key": "gpu", "efect": "NoSchedule"}]}}, "efect"),
    ({"prefill": {"affinity": {"podAntiAfinity": {}}}}, "podAntiAfinity"),
    ({"router": {"env": [{"name": "A", "valueFrom": {"secretRef": {"name": "s"}}}]}}, "secretRef"),
    ({"decode": {"extraVolumes": [{"name": "v", "hostpath": {"path": "/v"}}]}}, "hostpath"),
    ({"decode": {"extraVolumeMounts": [{"name": "v", "path": "/v"}]}}, "mountPath"),
    ({"decode": {"securityContext": {"runAsUser": "root"}}}, "runAsUser"),
    ({"router": {"podSecurityContext": {"fsgroup": 1}}}, "fsgroup"),
    ({"prefill": {"initContainers": [{"name": "c", "comand": ["x"]}]}}, "comand"),
    ({"networkPolicy": {"clients": [{"podSelectors": {}}]}}, "podSelectors"),
    ({"decode": {"extraArgs": ["max-num-seqs=8"]}}, "extraArgs"),
    ({"decode": {"sidecars": [{"name": "c", "imag": "x"}]}}, "imag"),
    ({"decode": {"envFrom": [{"secret": {"name": "x"}}]}}, "secret"),
    ({"decode": {"network": {"kvHost": "eth0"}}}, "kvHost"),
    ({"decode": {"network": {"rdma": {"hca": 1}}}}, "hca"),
    ({"decode": {"nccl": {"preset": "ib"}}}, "preset"),
    ({"decode": {"resourceClaims": [{"name": "a", "claimName": "b"}]}}, "claimName"),
    ({"scheduling": {"kind": "slurm"}}, "kind"),
    ({"compileCache": {"type": "image"}}, "type"),
    ({"monitoring": {"podMonitor": {"relabelings": [{"target": "a"}]}}}, "target"),
    ({"global": {"imageRegistry": "https://reg.corp/"}}, "imageRegistry"),
    ({"image": {"engine": {"tag": "a b"}}}, "tag"),
    ({"router": {"httpRoute": {"parentRefs": [{"nam": "g"}]}}}, "parentRefs"),
    ({"router": {"ingress": {"host": "X_y"}}}, "host"),
    ({"decode": {"sidecars": [{"name": "c"}]}}, "image"),
    ({"decode": {"priorityClassName": "High Prio"}}, "priorityClassName"),
    (
        {"monitoring": {"prometheusTrigger": {
            "authenticationRef": {"kind": "ClusterTriggerAuthentication"},
        }}},
        "authenticationRef",
    ),
]  # fmt: skip

PASSED_THROUGH = {
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
    "extraVolumes": [{"name": "v", "hostPath": {"path": "/v"}}],
    "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
    "securityContext": {"runAsUser": 0},
}


@pytest.mark.parametrize("engine", ["helm-4", "helm-3"])
def test_mistakes_between_values_are_told_with_their_cure(engine: str) -> None:
    """All of them on the new engine; the old one renders the same templates, so a few do."""
    cases = BETWEEN_VALUES if engine == "helm-4" else BETWEEN_VALUES[::7]
    helm = HelmSdk.shared() if engine == "helm-4" else HelmCli()
    for over, cure in cases:
        with pytest.raises(HelmError) as told:
            helm.render(overlay(MINIMAL, over))
        assert cure in str(told.value), f"{over}: {told.value}"


@pytest.mark.parametrize("engine", ["helm-4", "helm-3"])
def test_values_that_nothing_honours_are_refused_by_name(engine: str) -> None:
    cases = AGAINST_THE_SCHEMA if engine == "helm-4" else AGAINST_THE_SCHEMA[::4]
    helm = HelmSdk.shared() if engine == "helm-4" else HelmCli()
    for over, name in cases:
        with pytest.raises(HelmError) as told:
            helm.render(overlay(MINIMAL, over))
        assert name in str(told.value), f"{over}: {told.value}"


def _keys(values: dict[str, Any], depth: int) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (key,)
        if isinstance(value, dict) and depth > 1:
            yield from ((key, *rest) for rest in _keys(value, depth - 1))


def test_a_key_without_a_value_is_refused_by_name_or_as_good_as_not_there() -> None:
    """As it is in YAML when all below it is a comment."""
    helm = HelmSdk.shared()
    num_refused = 0
    for path in _keys(yaml.safe_load((CHART / "values.yaml").read_text()), depth=2):
        over: Any = None
        for key in reversed(path):
            over = {key: over}
        try:
            helm.render(overlay(MINIMAL, over))
        except HelmError as error:
            assert "missing propert" in str(error), f"{path}: {error}"
            assert path[-1] in str(error)
            num_refused += 1
    assert num_refused > 60


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(HelmError) as told:
        HelmSdk.shared().render({"decode": {"strategy": {"maxUnavailable": 0}}})
    text = str(told.value)
    assert "model.name is empty" in text and "decode.strategy" in text


def test_flags_are_those_of_the_image() -> None:
    """One of another version may have flags that this chart's programs do not have."""
    given = {"decode": {"extraArgs": ["--max-num-seqs=8", "--no-enforce-eager"]}}
    known = HelmSdk.shared().render(overlay(MINIMAL, given))
    given["decode"]["extraArgs"].append("--of-tomorrow=1")
    newer = {"image": {"engine": {"tag": "0.3.0", "digest": f"sha256:{'0' * 64}"}}}
    later = HelmSdk.shared().render(overlay(overlay(MINIMAL, given), newer))
    for found in (known, later):
        spec = found.one("Deployment", "decode")["spec"]["template"]["spec"]
        assert "--no-enforce-eager" in spec["containers"][0]["args"]
    router = {"router": {"extraArgs": ["--of-tomorrow=1"]}}
    with pytest.raises(HelmError, match="image.router.tag"):
        HelmSdk.shared().render(overlay(overlay(MINIMAL, newer), router))


def test_an_old_kubernetes_is_told_that_it_has_no_image_volumes() -> None:
    values = {"model": {"storage": {"type": "image", "image": {"reference": "r/m:1"}}}}
    with pytest.raises(HelmError, match="use pvc or hostPath"):
        HelmSdk.shared().render(values, kube_version="1.28.0")


@pytest.mark.parametrize(
    ("over", "cure"),
    [
        ({"decode": {"sidecars": [{"name": "a", "image": "i:1"}]}}, "1.29, and this is v1.28.0"),
        ({"decode": {"gpu": {"source": "claim"}}}, "use the device plugin"),
        (
            {"decode": {"resourceClaims": [{"name": "a", "resourceClaimName": "b"}]}},
            "use extended resources",
        ),
    ],
)
def test_an_old_kubernetes_is_told_what_it_lacks(over: dict[str, Any], cure: str) -> None:
    with pytest.raises(HelmError) as told:
        HelmSdk.shared().render(overlay(MINIMAL, over), kube_version="1.28.0")
    assert cure in str(told.value)


def test_a_missing_operator_is_a_warning_not_an_error() -> None:
    """GitOps renders charts without the cluster's APIs."""
    values = overlay(MINIMAL, {"monitoring": {"podMonitor": {"enabled": True}}})
    found = HelmSdk.shared().render(values, api_versions=())
    assert found.all("PodMonitor")
    assert "monitoring.podMonitor needs monitoring.coreos.com/v1" in found.notes
    assert "needs monitoring" not in HelmSdk.shared().render(values).notes


def test_notes_say_that_nothing_answers_without_decode_pods() -> None:
    words = "decode has no pods, so that nothing answers: raise its replicas"

    def notes(**values: Any) -> str:
        return HelmSdk.shared().render(overlay(MINIMAL, values)).notes

    assert words in notes(decode={"replicas": 0})
    assert words not in notes() and "decode has no pods" not in notes(prefill={"replicas": 0})
    assert words not in notes(decode={"replicas": 0}, node={"replicas": 1, "role": "decode"})
    models = [{"name": "b", "model": {"name": "org/b"}, "decode": {"replicas": 0}}]
    assert "models (b): decode has no pods" in notes(models=models)


def test_an_image_by_its_digest_alone_may_have_other_flags() -> None:
    values = {"decode": {"extraArgs": ["--of-a-later-version=1"]}}
    with pytest.raises(HelmError, match="does not have"):
        HelmSdk.shared().render(overlay(MINIMAL, values))
    engine = {"digest": "sha256:" + "0" * 64}
    HelmSdk.shared().render(overlay(MINIMAL, values | {"image": {"engine": engine}}))


def test_notes_say_how_to_reach_it_and_what_to_mind() -> None:
    notes = HelmSdk.shared().render(MINIMAL, release="prod", namespace="llm").notes
    assert "http://prod-tandem-router.llm.svc.cluster.local:80/v1" in notes
    assert "helm -n llm test prod" in notes and "together at most 2 GPUs" in notes
    assert "no request needs an API key" in notes and "an upgrade is an outage" in notes


def test_notes_say_what_an_autoscaler_asks_for() -> None:
    scaled = overlay(MINIMAL, {"decode": {"autoscaling": {"kind": "hpa"}}})
    mind = "decode scales by custom metrics, which an adapter serves"
    assert mind in HelmSdk.shared().render(scaled).notes
    rules = {"monitoring": {"adapterRules": {"enabled": True}}}
    assert mind not in HelmSdk.shared().render(overlay(scaled, rules)).notes
    assert mind not in HelmSdk.shared().render(MINIMAL).notes


SNAPSHOT = "hub/models--org--a--b/snapshots/0a1b2c"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"name": "org/model"}, "org/model"),
        ({"name": "org/model", "servedName": "chat, gpt-4o"}, "chat"),
        (
            {"storage": {"type": "hostPath", "path": "deepseek/V3/", "hostPath": {"path": "/m"}}},
            "V3",
        ),
        (
            {"storage": {"type": "hostPath", "path": SNAPSHOT, "hostPath": {"path": "/m"}}},
            "org/a/b",
        ),
        ({"storage": {"type": "image", "image": {"reference": "r/m:1"}}}, "models"),
    ],
)
def test_notes_ask_for_the_model_by_a_name_that_nodes_serve(
    model: dict[str, Any], name: str
) -> None:
    found = HelmSdk.shared().render({"model": model})
    assert f"serves {name} in namespace" in found.notes
    assert f'{{"model": "{name}",' in found.notes
    [argument] = [a for a in containers(found)["decode"]["args"] if a.startswith("--model=")]
    if "storage" in model:
        assert _name_of(Path(argument.removeprefix("--model="))) == name


@pytest.mark.parametrize("engine", ["helm-4", "helm-3"])
def test_what_kubernetes_knows_passes(engine: str) -> None:
    helm = HelmSdk.shared() if engine == "helm-4" else HelmCli()
    pod = helm.render(overlay(MINIMAL, {"decode": PASSED_THROUGH})).one("Deployment", "decode")
    spec = pod["spec"]["template"]["spec"]
    assert spec["tolerations"] == PASSED_THROUGH["tolerations"]
    assert PASSED_THROUGH["env"][0] in spec["containers"][0]["env"]
    assert PASSED_THROUGH["extraVolumes"][0] in spec["volumes"]


def test_resources_may_be_taken_away() -> None:
    rendered = HelmSdk.shared().render(overlay(MINIMAL, {"tierDefaults": {"resources": None}}))
    container = rendered.one("Deployment", "decode")["spec"]["template"]["spec"]["containers"][0]
    gpu = {"nvidia.com/gpu": 1}
    assert container["resources"] == {"limits": gpu, "requests": gpu}


def test_releases_whose_long_names_begin_alike_are_two() -> None:
    """A name is cut to 38 characters, so that everything that is appended fits into 63."""
    begin = "serving-of-the-large-model-for-the-whole-company"
    names = set()
    for end in ("", "-a", "-b"):
        found = HelmSdk.shared().render({**MINIMAL, "fullnameOverride": begin + end})
        names.add(found.one("Deployment", "decode")["metadata"]["name"])
    assert len(names) == 3
    assert all(len(name) <= 38 + len("-decode") for name in names)
