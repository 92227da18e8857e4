"""Shows that a real Prometheus scrapes llamaq, and that every query of the dashboard and the alerts returns data.

    make check-monitoring        # needs prometheus and promtool on the PATH: apt-get install prometheus

Starts a Redis, a worker with the demo model, `llamaq metrics` and Prometheus, and submits jobs for half a minute. Exits
with 1 if a rule is not valid or a query returns no number.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from redis import Redis
from rich.console import Console
from tests.monitoring.queries import ALERTS, FOLDER, alert_queries, panel_queries, without_thresholds, without_variables
from tests.support.ports import reserve_port

from llamaq.producer import Client, JobFailed, LlamaqError
from llamaq.worker.local.embedded_redis import EmbeddedRedis

console = Console(soft_wrap=True, markup=False, highlight=False)
LLAMAQ = Path(sys.executable).with_name("llamaq")
START_TIMEOUT_S = 60.0
LOAD_S = 30.0
SCRAPE_S = 1
PREFIX = "Once upon a time there was a little fox named Finn who lived near a river. "


def wait_for(condition: Callable[[], Any], what: Callable[[], str]) -> Any:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            sys.exit(f"not within {START_TIMEOUT_S:g} s: {what()}")
        time.sleep(0.1)
    return found


@contextmanager
def process(log: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program whose output is written to `log`, and end it with the context."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            arguments, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables}, cwd=log.parent
        )
    try:
        yield running
    finally:
        running.terminate()
        running.wait(60)


def port_of(log: Path) -> int:
    """Wait until a process serves its metrics, and return the port."""
    pattern = re.compile(r"metrics\.served address=\S+ port=(\d+)")
    found = wait_for(lambda: pattern.search(log.read_text()), lambda: f"metrics.served in\n{log.read_text()}")
    return int(found[1])


def submit_jobs(url: str, stopped: threading.Event) -> None:
    """Submit jobs of both priorities, with and without shared prefixes, some of which fail, and keep some waiting."""
    with Client(url, timeout_s=120) as client:
        number = 0
        while not stopped.is_set():
            number += 1
            jobs = [
                client.submit(f"{PREFIX}{number % 3}", max_tokens=20, priority="bulk" if at % 2 else "interactive")
                for at in range(6)
            ]
            jobs.append(client.submit("fails", logit_bias={10**6: 1.0}))
            for job in jobs:
                with suppress(JobFailed):
                    job.result()


def run_promtool() -> None:
    for arguments in (("check", "rules", ALERTS), ("test", "rules", FOLDER / "alerts_test.yml")):
        subprocess.run(["promtool", *map(str, arguments)], check=True)
    subprocess.run(["promtool", "check", "config", str(FOLDER / "prometheus.yml")], check=True)


def write_config(folder: Path, ports: dict[str, int]) -> Path:
    """Write the configuration of Prometheus of the repository, with short intervals and these targets."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(ALERTS)]
    config["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in ports.items()
    ]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        with suppress(OSError):
            return all(target["health"] == "up" for target in self.get("/api/v1/targets")["activeTargets"])
        return False

    def numbers(self, expression: str) -> list[float]:
        """Return the values of a query that are numbers."""
        values = [float(one["value"][1]) for one in self.get("/api/v1/query", query=expression)["result"]]
        return [value for value in values if math.isfinite(value)]


def check(prometheus: Prometheus) -> list[str]:
    """Return the queries that return no number, and the rules that Prometheus cannot evaluate."""
    problems = []
    n_queries = 0
    queries = [(one, without_variables(one.expression, "15s")) for one in panel_queries()]
    queries += [(one, without_thresholds(one.expression)) for one in alert_queries()]
    for query, expression in queries:
        n_queries += 1
        found = prometheus.numbers(expression)
        console.print(f"{len(found):4} values  {query.where}: {' '.join(expression.split())[:110]}")
        if not found:
            problems.append(f"no number: {query.where}: {expression}")
    evaluated = [rule for group in prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    problems += [f"{rule['name']}: {rule.get('lastError')}" for rule in evaluated if rule["health"] != "ok"]
    console.print(f"{n_queries} queries, {len(evaluated)} rules, {len(problems)} problems")
    return problems


def main() -> int:
    """Run the check and return the exit code."""
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    if missing:
        sys.exit(f"not on the PATH: {', '.join(missing)}. Debian, Ubuntu: apt-get install prometheus")
    run_promtool()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(EmbeddedRedis()).url
        with Redis.from_url(url) as redis:
            redis.config_set("maxmemory", "1gb")
        worker, metrics = folder / "worker.log", folder / "metrics.log"
        common = {"LLAMAQ_REDIS_URL": url}
        stack.enter_context(
            process(worker, str(LLAMAQ), "worker", "--metrics-port", "0", "--n-parallel", "2", **common)
        )
        stack.enter_context(process(metrics, str(LLAMAQ), "metrics", "--port", "0", **common))
        ports = {"llamaq": port_of(metrics), "llamaq-workers": port_of(worker)}
        stopped = threading.Event()
        load = threading.Thread(target=submit_jobs, args=(url, stopped), name="load", daemon=True)
        stack.callback(load.join, 120)
        stack.callback(stopped.set)
        load.start()
        config, port = write_config(folder, ports), str(reserve_port())
        arguments = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}")
        listen = f"--web.listen-address=127.0.0.1:{port}"
        stack.enter_context(process(folder / "prometheus.log", "prometheus", *arguments, listen))
        prometheus = Prometheus(int(port))
        wait_for(prometheus.is_ready, lambda: "Prometheus scrapes both targets")
        console.print(f"prometheus scrapes {ports}; jobs run for {LOAD_S:g} s")
        time.sleep(LOAD_S)
        problems = check(prometheus)
    for problem in problems:
        console.print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LlamaqError, subprocess.CalledProcessError) as exc:
        sys.exit(str(exc))
