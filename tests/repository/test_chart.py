"""The Helm chart and llamaq agree. Helm is not needed: `make check-chart` renders the manifests in the repository."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from typing import Any

import pytest
import typer
import yaml
from tests.support.fake_redis import replace_redis

from llamaq.cli.main import build_app
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.settings import ENV_PREFIX, QueueSettings, client_settings
from llamaq.gateway.keys.key_check import OPEN_PATHS
from llamaq.gateway.settings import ServeSettings, serve_settings
from llamaq.producer import AsyncClient
from llamaq.tools.chart.__main__ import KUBERNETES
from llamaq.tools.chart.keda_schema import errors_in, is_of_keda
from llamaq.tools.chart.rendered import CHART, RENDERED, ROOT, header, manifests, values_files
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings, load_settings

LOADERS: dict[str, Callable[[], Any]] = {"worker": load_settings, "server": serve_settings}
"""The functions that read the settings of a container. Other containers have those of a client."""
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
NAMES = [path.name for path in values_files()]
Manifest = dict[str, Any]


@cache
def rendered(name: str) -> list[Manifest]:
    return manifests((RENDERED / name).read_text())


def of_kind(name: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in rendered(name) if manifest["kind"] == kind]


def pods(name: str) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield the pod and the only container of each deployment."""
    for deployment in of_kind(name, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        yield pod, container


def values() -> Manifest:
    loaded = yaml.safe_load((CHART / "values.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("name", NAMES)
def test_the_manifests_in_the_repository_were_rendered_from_this_chart(name: str) -> None:
    text = (RENDERED / name).read_text()
    assert text.startswith(header(CHART / "ci" / name)), "run `make check-chart`, which renders and validates the chart"


def test_there_are_no_other_manifests() -> None:
    assert sorted(path.name for path in RENDERED.iterdir()) == NAMES


def test_the_chart_has_the_version_of_llamaq() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version("llamaq")


def test_the_chart_is_checked_with_the_oldest_version_of_kubernetes_that_it_supports() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={KUBERNETES[0]}.0-0"
    assert f"Kubernetes {KUBERNETES[0]} or newer" in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_knows_the_hooks_of_all_versions_that_the_chart_supports(name: str) -> None:
    minor = int(KUBERNETES[0].partition(".")[2])
    for _, container in pods(name):
        if "sleep" in container.get("lifecycle", {}).get("preStop", {}):
            assert minor >= 30, "an API server before 1.30 drops `sleep`, and rejects the empty hook"


def test_every_pod_is_replaced_when_the_url_of_redis_in_the_values_changes() -> None:
    for name in NAMES:
        templates = [one["spec"]["template"] for one in of_kind(name, "Deployment")]
        digests = {(one["metadata"].get("annotations") or {}).get("checksum/redis-url") for one in templates}
        url = values_of(name)["redis"].get("url")
        assert digests == {url and hashlib.sha256(url.encode()).hexdigest()}, name


def test_the_values_repeat_the_defaults_of_the_settings() -> None:
    found = values()
    for setting, value in found["worker"]["settings"].items():
        assert value == WorkerSettings.model_fields[setting].default, setting
    for setting, value in found["server"]["settings"].items():
        assert setting == "require_key" or value == ServeSettings.model_fields[setting].default, setting
    for name, setting in (("queue", "queue"), ("keyPrefix", "key_prefix"), ("partitions", "partitions")):
        assert found[name] == QueueSettings.model_fields[setting].default, name


def test_prometheus_is_told_the_port_of_the_metrics() -> None:
    told = set()
    for service in (service for name in NAMES for service in of_kind(name, "Service")):
        if service["metadata"]["name"].endswith("-metrics"):
            (port,) = service["spec"]["ports"]
            assert service["metadata"]["annotations"]["prometheus.io/port"] == str(port["port"])
            told.add(port["port"])
    assert told == {9540, 9600}


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_variable_is_a_setting_with_a_valid_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, container in pods(name):
        for variable in container["env"]:
            monkeypatch.setenv(variable["name"], variable.get("value", "redis://redis:6379/0"))
        load: Callable[[], Any] = LOADERS.get(container["name"], client_settings)
        settings = load()
        in_values = values_of(name).get(container["name"], {}).get("env", [])
        for variable in container["env"]:
            if variable["name"].startswith(ENV_PREFIX):
                assert hasattr(settings, variable["name"].removeprefix(ENV_PREFIX).lower()), variable["name"]
            else:
                assert variable in in_values


def values_of(name: str) -> Manifest:
    loaded = yaml.safe_load((CHART / "ci" / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_every_container_runs_a_command_of_llamaq() -> None:
    commands = {tuple(container["args"]) for name in NAMES for _, container in pods(name)}
    assert {command[0] for command in commands} == {"worker", "serve", "metrics", "depth"}
    assert {("worker",), ("serve",)} <= commands, "their settings are environment variables"
    app: Any = typer.main.get_command(build_app())
    context = app.make_context("llamaq", [], resilient_parsing=True)
    for command, *arguments in commands - {("worker",), ("serve",)}:
        app.get_command(context, command).make_context(command, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_every_container_runs_as_an_ordinary_user(name: str) -> None:
    for pod, container in pods(name):
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_has_time_to_drain_and_is_ready_when_its_queue_is_served(name: str) -> None:
    (pod, worker) = next((pod, container) for pod, container in pods(name) if container["name"] == "worker")
    environment = {variable["name"]: variable.get("value", "") for variable in worker["env"]}
    drain_s = int(environment["LLAMAQ_DRAIN_S"])
    assert pod["terminationGracePeriodSeconds"] > drain_s + Supervisor.AFTER_DRAIN_S
    assert worker["readinessProbe"]["exec"]["command"] == ["llamaq", "health"]
    assert environment["LLAMAQ_QUEUE"] == values_of(name).get("queue", "default")


@pytest.mark.parametrize("name", NAMES)
def test_workers_and_servers_have_a_budget_of_disruptions(name: str) -> None:
    selectors = {one["metadata"]["name"]: one["spec"]["selector"] for one in of_kind(name, "Deployment")}
    budgets = {one["metadata"]["name"]: one["spec"]["selector"] for one in of_kind(name, "PodDisruptionBudget")}
    assert budgets == {each: selector for each, selector in selectors.items() if each.endswith(("-worker", "-server"))}


@pytest.mark.parametrize("name", ["plain.yaml", "server.yaml"])
def test_a_server_requires_keys_and_its_service_reaches_it(name: str) -> None:
    pod, server = next((pod, container) for pod, container in pods(name) if container["name"] == "server")
    environment = {variable["name"]: variable.get("value", "") for variable in server["env"]}
    assert environment["LLAMAQ_REQUIRE_KEY"] == "true"
    assert str(server["ports"][0]["containerPort"]) == environment["LLAMAQ_HTTP_PORT"]
    pause_s = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > pause_s + int(environment["LLAMAQ_SHUTDOWN_S"])
    assert server["readinessProbe"]["httpGet"]["path"] in OPEN_PATHS
    service = next(one for one in of_kind(name, "Service") if one["metadata"]["name"].endswith("-server"))
    deployment = next(one for one in of_kind(name, "Deployment") if one["metadata"]["name"].endswith("-server"))
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["targetPort"] == server["ports"][0]["name"]


def test_the_secrets_of_a_server_are_mounted_where_its_settings_read_them() -> None:
    pod, server = next((pod, container) for pod, container in pods("server.yaml") if container["name"] == "server")
    folders = {mount["mountPath"] for mount in server["volumeMounts"]}
    files = [
        variable["value"]
        for variable in server["env"]
        if variable["name"] in ("LLAMAQ_KEYS_FILE", "LLAMAQ_TLS_CERT", "LLAMAQ_TLS_KEY")
    ]
    assert len(files) == 3
    assert {file.rpartition("/")[0] for file in files} <= folders
    secrets = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    assert secrets == {"llamaq-keys", "llamaq-server-tls", "redis-ca"}
    assert server["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    (ingress,) = of_kind("server.yaml", "Ingress")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] in {one["metadata"]["name"] for one in of_kind("server.yaml", "Service")}


def test_a_gpu_is_a_limit_of_the_worker() -> None:
    worker = next(container for _, container in pods("gpu.yaml") if container["name"] == "worker")
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert worker["resources"]["requests"]["cpu"] == "2"


@pytest.mark.parametrize("name", NAMES)
def test_the_url_of_redis_is_in_a_secret_alone(name: str) -> None:
    for manifest in rendered(name):
        assert ("redis://" in str(manifest)) == (manifest["kind"] == "Secret")


@pytest.mark.parametrize(("name", "jobs_per_pod"), [("keda.yaml", 4), ("keda-sentinel.yaml", 2 * 32)])
def test_a_pod_gets_the_jobs_of_all_its_workers(name: str, jobs_per_pod: int) -> None:
    (scaled,) = of_kind(name, "ScaledObject")
    assert int(scaled["spec"]["advanced"]["scalingModifiers"]["target"]) == jobs_per_pod


@pytest.mark.parametrize("name", ["keda.yaml", "keda-sentinel.yaml"])
def test_keda_sums_the_lengths_of_all_job_streams(name: str) -> None:
    (scaled,) = of_kind(name, "ScaledObject")
    triggers, partitions = scaled["spec"]["triggers"], values_of(name).get("partitions", 1)
    assert {trigger["metadata"]["stream"] for trigger in triggers} == {
        Keys().jobs("default", partition, priority) for partition in range(partitions) for priority in Priority
    }
    modifiers = scaled["spec"]["advanced"]["scalingModifiers"]
    assert modifiers["formula"].split(" + ") == [trigger["name"] for trigger in triggers]
    assert {trigger["metadata"]["streamLength"] for trigger in triggers} == {modifiers["target"]}
    assert scaled["spec"]["minReplicaCount"] < scaled["spec"]["maxReplicaCount"]
    (target,) = [
        one
        for one in of_kind(name, "Deployment")
        if one["metadata"]["name"] == scaled["spec"]["scaleTargetRef"]["name"]
    ]
    assert "replicas" not in target["spec"], "KEDA alone sets the number of workers"


@pytest.mark.parametrize("name", NAMES)
def test_the_resources_of_keda_have_only_known_fields(name: str) -> None:
    for manifest in filter(is_of_keda, rendered(name)):
        assert errors_in(manifest) == []


@pytest.mark.parametrize("field", ["consumerGroup", "streamlength", "lagCount"])
def test_a_trigger_with_another_field_is_an_error(field: str) -> None:
    (scaled,) = of_kind("keda.yaml", "ScaledObject")
    broken = copy.deepcopy(scaled)
    broken["spec"]["triggers"][0]["metadata"][field] = "workers"
    assert field in errors_in(broken)[0]
    del broken["spec"]["triggers"][0]["metadata"][field]
    broken["spec"]["triggers"][0]["name"] = "interactive-0"
    assert "interactive-0" in errors_in(broken)[0]


async def test_a_fleet_of_no_workers_is_woken_by_each_job_and_by_a_delayed_job_when_it_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (scaled,) = of_kind("keda.yaml", "ScaledObject")
    streams = [trigger["metadata"]["stream"] for trigger in scaled["spec"]["triggers"]]
    async with AsyncClient(replace_redis(monkeypatch), partitions=2) as client:

        async def total() -> int:
            return sum([await client.redis.xlen(stream) for stream in streams])

        jobs = [await client.submit("x", priority=priority) for priority in (*Priority, *Priority)]
        assert await total() == 4
        for job in jobs:
            await job.cancel()
        assert await total() == 0
        await client.submit("x", delay_s=0.01)
        assert await total() == 0
        while await total() == 0:
            await client.queue_depth()  # the deployment `due-jobs` asks again and again
