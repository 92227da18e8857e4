"""The container image and the compose file are consistent. Docker is not needed."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.redis_servers import Server

from llamaq.common.settings import QueueSettings
from llamaq.gateway.settings import ServeSettings
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The parsed compose file with resolved merge keys."""
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def dockerfile() -> list[list[str]]:
    """The instructions of the Dockerfile as pairs of name and arguments. Continuation lines are joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def llama_requirement() -> str:
    """The version range of llama-cpp-python that the worker requires."""
    dependencies = tomllib.loads((ROOT / "worker" / "pyproject.toml").read_text())["project"]["dependencies"]
    (requirement,) = (name for name in dependencies if name.startswith("llama-cpp-python"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["tokenizer"] == [requirement]
    assert isinstance(requirement, str)
    return requirement


def arguments(dockerfile: list[list[str]], instruction: str) -> list[str]:
    return [args for name, args in dockerfile if name == instruction]


def services_of(compose: dict[str, Any], profile: str) -> set[str]:
    """Return the names of the services that `docker compose --profile PROFILE up` starts."""
    return {name for name, service in compose["services"].items() if profile in service.get("profiles", [profile])}


def seconds(duration: str) -> int:
    found = re.fullmatch(r"(\d+)s", duration)
    assert found
    return int(found[1])


def test_compose_starts_redis_and_one_cpu_worker_by_default(compose: dict[str, Any]) -> None:
    (profile,) = re.findall(r"^COMPOSE_PROFILES=(.*)$", (ROOT / ".env").read_text(), re.MULTILINE)
    assert services_of(compose, profile) == {"redis", "worker", "http"}


def test_compose_with_the_gpu_profile_starts_no_cpu_worker(compose: dict[str, Any]) -> None:
    assert services_of(compose, "gpu") == {"redis", "worker-gpu", "http-gpu"}


@pytest.mark.parametrize("suffix", ["", "-gpu"])
def test_the_http_server_has_the_image_of_the_worker_and_listens_on_this_host_alone(
    compose: dict[str, Any], suffix: str
) -> None:
    server, worker = compose["services"][f"http{suffix}"], compose["services"][f"worker{suffix}"]
    assert server["image"] == worker["image"]
    settings = ServeSettings.model_fields
    port = settings["http_port"].default
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"localhost:{port}/health" in server["healthcheck"]["test"][-1]
    assert seconds(server["stop_grace_period"]) > settings["shutdown_s"].default


def test_every_service_has_a_health_check_with_all_its_limits(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert {"test", "interval", "timeout", "retries"} <= service["healthcheck"].keys(), name


def test_redis_is_new_enough_keeps_jobs_on_disk_and_never_evicts_them(compose: dict[str, Any]) -> None:
    redis = compose["services"]["redis"]
    major = re.match(r"redis:(\d+)", redis["image"])
    assert major
    assert int(major[1]) >= 7
    command = " ".join(redis["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert re.search(r"--maxmemory \$\{LLAMAQ_REDIS_MAXMEMORY:-\d+(mb|gb)\}", command)
    assert "redis:/data" in redis["volumes"]
    assert "redis-cli ping" in redis["healthcheck"]["test"][-1]


def test_redis_is_reachable_from_this_host_alone(compose: dict[str, Any]) -> None:
    assert all(port.startswith("127.0.0.1:") for port in compose["services"]["redis"]["ports"])


def test_the_observe_profile_adds_metrics_prometheus_and_grafana(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services_of(compose, "observe") == {"redis", "metrics", "prometheus", "grafana"}
    assert services["metrics"]["build"] == services["worker"]["build"]
    (job,) = yaml.safe_load((ROOT / "docs/monitoring/prometheus.yml").read_text())["scrape_configs"]
    port = services["metrics"]["command"][services["metrics"]["command"].index("--port") + 1]
    assert job["static_configs"] == [{"targets": [f"metrics:{port}"]}]
    assert f"localhost:{port}/health" in " ".join(services["metrics"]["healthcheck"]["test"])
    for name in ("metrics", "prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in services[name].get("ports", ())), name


def test_every_file_that_compose_mounts_exists(compose: dict[str, Any]) -> None:
    mounts = [volume for service in compose["services"].values() for volume in service.get("volumes", ())]
    mounted = [ROOT / volume.split(":")[0] for volume in mounts if volume.startswith("./docs")]
    assert len(mounted) >= 4
    assert [path for path in mounted if not path.exists()] == []


@pytest.mark.parametrize("name", ["worker", "worker-gpu"])
def test_a_worker_waits_for_redis_and_is_healthy_when_its_queue_is_served(compose: dict[str, Any], name: str) -> None:
    worker = compose["services"][name]
    assert worker["depends_on"]["redis"]["condition"] == "service_healthy"
    assert worker["environment"]["LLAMAQ_REDIS_URL"].startswith("redis://redis:")
    assert worker["command"] == ["worker"], "LLAMAQ_QUEUE names the queue, also for the health check"
    http = compose["services"][name.replace("worker", "http")]
    assert {"LLAMAQ_QUEUE"} <= worker["environment"].keys() & http["environment"].keys()
    assert worker["healthcheck"]["test"] == ["CMD", "llamaq", "health"]
    drain_s = WorkerSettings.model_fields["drain_s"].default
    assert seconds(worker["stop_grace_period"]) > drain_s + Supervisor.AFTER_DRAIN_S


def test_redis_accepts_the_options_of_the_compose_file(compose: dict[str, Any], free_port: int, tmp_path: Path) -> None:
    _, *options = compose["services"]["redis"]["command"]
    options = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", option) for option in options]
    server = Server(tmp_path, free_port, tuple(options))
    try:
        server.start()
        with server.client() as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("maxmemory") == {"maxmemory": str(2**30)}
            assert client.config_get("appendonly") == {"appendonly": "yes"}
    finally:
        server.kill()


def test_the_gpu_worker_reserves_an_nvidia_device(compose: dict[str, Any]) -> None:
    worker = compose["services"]["worker-gpu"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert "-DGGML_CUDA=ON" in worker["build"]["args"]["CMAKE_ARGS"]


def test_every_named_volume_is_declared(compose: dict[str, Any]) -> None:
    used = {
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", ())
        if not volume.startswith(".")
    }
    assert used == set(compose["volumes"])


def test_compose_passes_only_build_arguments_that_the_dockerfile_takes(
    compose: dict[str, Any], dockerfile: list[list[str]]
) -> None:
    taken = {args.split("=")[0] for args in arguments(dockerfile, "ARG")}
    assert set(compose["services"]["worker-gpu"]["build"]["args"]) <= taken


def test_no_two_services_build_the_same_tag(compose: dict[str, Any]) -> None:
    """Compose builds all services at once. Docker may reject the second build of a tag: "already exists"."""
    built = [service["image"] for service in compose["services"].values() if "build" in service]
    assert len(built) == len(set(built)) >= 3


@pytest.mark.parametrize("profile", ["cpu", "gpu", "observe"])
def test_every_image_of_this_repository_is_built_by_a_service_of_the_same_profile(
    compose: dict[str, Any], profile: str
) -> None:
    services = [compose["services"][name] for name in services_of(compose, profile)]
    ours = {service["image"] for service in services if service["image"].startswith("llamaq-")}
    assert ours == {service["image"] for service in services if "build" in service} != set()


def test_every_path_that_the_dockerfile_copies_exists_and_is_not_ignored(dockerfile: list[list[str]]) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [args.split() for args in arguments(dockerfile, "COPY") if not args.startswith("--from")]
    sources = {source for *sources, _ in copies for source in sources}
    assert {"common", "producer", "worker", "pyproject.toml"} <= sources
    assert sources <= allowed
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_the_image_does_not_depend_on_the_cpu_of_the_build_machine(dockerfile: list[list[str]]) -> None:
    (build,) = (run for run in arguments(dockerfile, "RUN") if "LLAMA_CPP_PYTHON" in run)
    assert "-DGGML_NATIVE=OFF" in build
    assert "GGML_NATIVE=ON" not in build
    # the user's arguments come last, so that they override the default arguments
    assert build.index("-DGGML_NATIVE=OFF") < build.index("${CMAKE_ARGS}")


def test_image_and_makefile_leave_out_the_same_parts_of_llama_cpp(dockerfile: list[list[str]]) -> None:
    (build,) = (run for run in arguments(dockerfile, "RUN") if "LLAMA_CPP_PYTHON" in run)
    makefile = (ROOT / "Makefile").read_text()
    without_server = re.sub(r"^\S*/llama-server:.*?\n\n", "", makefile, flags=re.MULTILINE | re.DOTALL)
    left_out = re.compile(r"-D(LLA[A-Z_]+)=OFF|set\((LLAMA_[A-Z_]+) OFF\)")
    assert set(left_out.findall(build)) == set(left_out.findall(without_server)) != set()


def test_the_image_has_each_library_of_llama_cpp_once(dockerfile: list[list[str]], tmp_path: Path) -> None:
    (build,) = (run for run in arguments(dockerfile, "RUN") if "LLAMA_CPP_PYTHON" in run)
    for name in ("libllama.so", "libggml-cuda.so"):
        for suffix in ("", ".0", ".0.5.0"):
            (tmp_path / f"{name}{suffix}").write_text(name)
    loop = build[build.index("for copy in ") :]
    subprocess.run(["sh", "-e", "-c", loop], cwd=tmp_path, check=True, timeout=10)
    assert {path.name for path in tmp_path.iterdir() if not path.is_symlink()} == {"libllama.so", "libggml-cuda.so"}
    assert (tmp_path / "libllama.so.0").read_text() == (tmp_path / "libllama.so.0.5.0").read_text() == "libllama.so"
    assert (tmp_path / "libggml-cuda.so.0").read_text() == "libggml-cuda.so"


def test_the_user_of_the_image_owns_the_folder_of_downloads_and_its_parent(
    compose: dict[str, Any], dockerfile: list[list[str]]
) -> None:
    (setup,) = (run for run in arguments(dockerfile, "RUN") if "useradd" in run)
    words = shlex.split(setup[setup.index("install --directory") :])
    (downloads,) = (volume.split(":")[1] for volume in compose["services"]["worker"]["volumes"] if ":/home/" in volume)
    assert {downloads, str(Path(downloads).parent)} <= set(words)


def test_every_command_of_the_dockerfile_is_valid_shell(dockerfile: list[list[str]]) -> None:
    for command in arguments(dockerfile, "RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True, timeout=10)


def test_the_image_and_make_install_all_distributions_of_this_checkout(dockerfile: list[list[str]]) -> None:
    install = "/opt/llamaq/bin/pip install '/src[worker,hub,metrics,serve,top]' /src/worker /src/producer"
    assert f"HATCH_BUILD_HOOKS_ENABLE=true {install}" in arguments(dockerfile, "RUN")
    recipes = (ROOT / "Makefile").read_text()
    assert "pip install --quiet -e '.[worker,serve]' -e ./worker -e ./producer" in recipes
    assert "pip install --quiet -e '.[worker,serve,dev]' -e ./worker -e ./producer" in recipes


def test_the_image_builds_llama_cpp_python_in_the_range_of_the_worker(
    dockerfile: list[list[str]], llama_requirement: str
) -> None:
    (pinned,) = (args for args in arguments(dockerfile, "ARG") if args.startswith("LLAMA_CPP_PYTHON="))
    assert shlex.split(pinned) == [f"LLAMA_CPP_PYTHON={llama_requirement}"]


def test_the_image_runs_a_worker_as_an_ordinary_user_with_a_health_check(dockerfile: list[list[str]]) -> None:
    last = [name for name, _ in dockerfile][::-1].index("FROM")
    runtime = dockerfile[-last:]
    assert arguments(runtime, "USER") == ["llamaq"]
    assert "useradd" in arguments(runtime, "RUN")[0]
    assert arguments(runtime, "ENTRYPOINT") == ['["tini", "-s", "--", "llamaq"]']
    assert arguments(runtime, "CMD") == ['["worker"]']
    assert arguments(runtime, "HEALTHCHECK")[0].endswith('CMD ["llamaq", "health"]')


def test_process_1_of_the_image_leaves_no_zombie_of_a_worker_that_crashed(
    compose: dict[str, Any], dockerfile: list[list[str]]
) -> None:
    last = [name for name, _ in dockerfile][::-1].index("FROM")
    (setup,) = (run for run in arguments(dockerfile[-last:], "RUN") if "apt-get install" in run)
    assert "tini" in shlex.split(setup)
    assert arguments(dockerfile, "ENTRYPOINT")[0].startswith('["tini", "-s",')
    assert not any("entrypoint" in service for service in compose["services"].values())


def test_the_settings_named_in_the_compose_file_exist(compose: dict[str, Any]) -> None:
    fields = {f"LLAMAQ_{name.upper()}" for name in (*QueueSettings.model_fields, *WorkerSettings.model_fields)}
    assert set(compose["services"]["worker"]["environment"]) <= fields
