"""Every benchmark runs. Its last line is JSON with the figures, and the hardware and versions of the measurement."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked_scripts import run_script

from llamaq.worker.plugins import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 100


def run_quickly(name: str, *arguments: str) -> dict[str, Any]:
    """Run `bench/<name>.py --quick`, and return the figures of the JSON in its last line."""
    script = [str(ROOT / "bench" / f"{name}.py"), "--quick", *arguments]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAQ_BENCH_")}
    done = run_script(script, cwd=ROOT, variables=alone, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == name
    assert result["quick"] is True
    assert {"date", "hardware", "versions", "compiled", "commit", "seed", "n_threads", "figures"} <= result.keys()
    assert result["versions"]["llama-cpp-python"]
    assert result["hardware"]["cores"] >= 1
    figures: dict[str, Any] = result["figures"]
    return figures


def assert_spread(figures: dict[str, float]) -> None:
    assert 0 < figures["p50"] <= figures["p95"] <= figures["p99"] <= figures["max"]


def test_the_bare_loop_generates_with_one_and_with_several_sequences() -> None:
    figures = run_quickly("bare_loop")
    assert all(figures[number]["tokens_per_s"] > 0 for number in ("1", "4"))


def test_a_single_job_gives_the_tokens_of_the_bare_loop() -> None:
    figures = run_quickly("single_generate")
    assert figures["same_tokens"] == figures["jobs"]
    assert figures["stream"]["tokens"] == figures["jobs"] * figures["tokens_out"]
    assert figures["vs_bare"] > 0
    assert_spread(figures["stream"]["ttft_ms"])
    assert_spread(figures["generate_latency_ms"])


def test_a_burst_of_admissions_takes_time_with_and_without_a_cache() -> None:
    figures = run_quickly("admissions")
    assert all(figures[kind]["4"]["us_per_admission"] > 0 for kind in ("no_cache", "shared"))


def test_concurrent_jobs_are_all_streamed_to_their_ends() -> None:
    figures = run_quickly("overhead")
    for number, kinds in figures["jobs"].items():
        for kind in ("greedy", "sampled", "schema"):
            worker = kinds[kind]["worker"]
            assert worker["tokens"] == int(number) * figures["tokens_out"]
            assert worker["vs_bare"] > 0
            assert_spread(worker["ttft_ms"])


def test_speculation_is_measured_on_texts_that_repeat_themselves_and_on_others() -> None:
    figures = run_quickly("speculation")
    for by_number in figures["texts"].values():
        one = by_number["1"]
        assert one["off"]["tokens"] == one["ngram"]["tokens"] == figures["tokens_out"]
        assert one["off"]["drafted_tokens"] == 0
    assert figures["texts"]["edit"]["1"]["ngram"]["accepted_tokens"] > 0
    assert figures["targets"]["edit_1"]["target"] == 1.5


def test_a_draft_model_that_is_always_right_is_measured() -> None:
    figures = run_quickly("draft_model")
    one = figures["drafts"]["right, 1"]
    assert one["off"]["tokens"] == one["on"]["tokens"] == figures["tokens_out"]
    assert one["off"]["drafted_tokens"] == 0
    assert one["on"]["drafted_tokens"] == one["on"]["accepted_tokens"]
    assert one["same_outputs"] == 1
    assert figures["targets"]["right, 1"]["target"] == 1.2


def test_backend_sampling_is_compared_with_the_worker_without_it() -> None:
    figures = run_quickly("backend_sampling")
    for numbers in figures["jobs"].values():
        assert all(one["speed_up"] > 0 for one in numbers.values())


def test_both_kinds_of_kv_cache_are_measured() -> None:
    figures = run_quickly("kv_unified")
    for one in figures["sequences"]["short"].values():
        assert min(one["unified"], one["separate"]) > 0
        assert one["unified_speed"] > 0


def test_every_strategy_runs_the_same_jobs() -> None:
    figures = run_quickly("strategies")
    for mix in ("interactive", "bulk"):
        assert set(figures[mix]) == set(BUILT_IN)
        assert len({one["all"]["tokens"] for one in figures[mix].values()}) == 1
        assert len({one["all"]["jobs"] for one in figures[mix].values()}) == 1
        for one in figures[mix].values():
            assert_spread(one["all"]["ttft_ms"])


def test_text_and_token_prompts_are_compared_beside_streams() -> None:
    figures = run_quickly("tokenize_overhead")
    assert figures["encode_ms"] > 0
    assert figures["text"]["all"]["tokens"] == figures["ids"]["all"]["tokens"]
    assert figures["text"]["long"]["jobs"] == 3
    assert "long" not in figures["alone"]
    for side in ("alone", "text", "ids"):
        assert figures[side]["short"]["tokens_per_s"] > 0
        assert_spread(figures[side]["short"]["ttft_ms"])


def test_a_turn_of_a_chat_computes_its_new_tokens_and_at_most_one_more() -> None:
    figures = run_quickly("prefix_cache")
    sides = figures["sides"]["llamaq"]
    assert set(sides["on"]) == set(sides["off"]) == {"1", "2", "3", "4"}
    for turn in ("2", "3", "4"):
        assert sides["on"][turn]["computed_tokens"] <= figures["tokens_next"] + 1
        assert sides["off"][turn]["computed_tokens"] == sides["off"][turn]["prompt_tokens"]
    assert figures["targets"]["most_extra_tokens"]["is_met"]
    assert sides["speed_up"]["mean"] > 0


def test_the_shared_prefix_of_simultaneous_jobs_is_computed_once() -> None:
    figures = run_quickly("shared_prefix")
    for number, sides in figures["shared"]["128"].items():
        assert sides["llamaq"]["tokens"] == int(number) * figures["tokens_out"]
        assert 1 <= sides["llamaq"]["computed_per_distinct"] <= 1.02
        assert_spread(sides["llamaq"]["ttft_ms"])


def test_one_prompt_more_than_slots_is_computed_in_the_first_cycle_only() -> None:
    figures = run_quickly("cyclic_prompts")
    for pool in ("all_in_cells", "half_in_cells"):
        first, second = (figures[pool]["cycles"][number]["llamaq"] for number in ("1", "2"))
        assert first["reused"] == 0
        assert first["computed_tokens"] == figures["prompts"] * figures["tokens_in"]
        assert second["reused"] >= 0.95
        assert figures[pool]["targets"]["reused"]["is_met"]


def test_the_cost_of_the_cache_is_measured_with_prompts_that_share_no_prefix() -> None:
    figures = run_quickly("no_hits")
    sides = figures["sides"]
    assert {"null", "default", "held-0", "held-256"} <= set(sides)
    for one in sides.values():
        assert one["tokens"] == figures["jobs"] * figures["tokens_out"]
        assert one["reused"] == 0
        assert one["tick_ms"] > one["scheduler_ms"] > one["memory_ms"] > one["moves_ms"] > 0
        assert 0 < one["bookkeeping_share"] < 1
    assert sides["null"]["vs_null"] == 1
    assert sides["null"]["cache"]["entries"] == 0
    # the entries that stay in the cache while the worker is idle
    assert sides["held-256"]["cache"]["entries"] > sides["held-0"]["cache"]["entries"]


def test_the_cost_of_a_client_is_measured_for_streams_waiting_calls_and_long_prompts() -> None:
    figures = run_quickly("client_cost")
    assert [one["tokens"] for one in figures["streams"].values()] == [5, 100]
    assert all(one["cpu_us_per_token"] > 0 for one in figures["streams"].values())
    assert 0 < figures["idle_waiters"]["core_percent_later"] < 100
    assert 0 < figures["long_prompt"]["loop_blocked_ms"] < figures["long_prompt"]["submit_ms"]


def test_streams_are_measured_while_a_prompt_is_computed() -> None:
    figures = run_quickly("itl_under_prefill")
    one = figures["systems"]["latency-target"]
    assert one["gap_ms"]["p50"] <= one["gap_ms"]["max"]  # both 0 if the prompt is computed between two tokens
    assert one["ttft_long_ms"] > 0
    assert figures["targets"]["gap_p95_ms"]["target"] == figures["target_ms"]


def test_ticks_with_a_full_chunk_are_measured_beside_streams() -> None:
    figures = run_quickly("long_prompt")
    for one in (figures["chunked"], figures["unchunked"]):
        assert_spread(one["chunk_tick_ms"])
        assert one["longest_gap_ms"] > 0
        assert one["tick_within_ms"] > 0


def test_a_bulk_run_computes_its_shared_prefix_once() -> None:
    figures = run_quickly("bulk")
    shared = figures["shared"]["llamaq"]
    assert shared["computed_tokens"] == figures["tokens_shared"] + figures["rows"] * figures["tokens_own"]
    assert shared["computed_per_distinct"] == 1
    assert_spread(figures["interactive"]["busy_ttft_ms"])


def test_streams_through_http_are_compared_with_those_of_the_client() -> None:
    figures = run_quickly("serve_overhead")
    client, serve = figures["streams"]["client"], figures["streams"]["serve"]
    assert client["tokens"] == serve["tokens"] > 0
    assert client["vs_client"] == 1
    assert serve["vs_client"] > 0
    assert_spread(figures["idle"]["serve"])


def test_open_http_streams_are_measured_while_they_wait() -> None:
    figures = run_quickly("open_streams")
    assert figures["streams"] > 0
    assert figures["kb_per_stream"] > 0
    assert_spread(figures["health_ms"])
    assert_spread(figures["ttft_ms"])


def test_the_latency_of_the_queue_is_measured_for_jobs_and_tokens() -> None:
    engine = run_quickly("queue_latency")["engines"]["null"]
    assert_spread(engine["submit_to_admitted_ms"])
    assert_spread(engine["token_to_subscriber_ms"])


def test_jobs_a_second_are_measured_beside_rq_and_a_plain_stream() -> None:
    figures = run_quickly("queue_throughput")
    assert set(figures["systems"]) == {"llamaq", "llamaq_bulk", "rq", "rq_simple", "stream"}
    assert all(one["jobs_per_s"] > 0 for one in figures["systems"].values())
    assert figures["systems"]["rq"]["vs_rq"] == 1


def test_the_page_of_results_has_the_targets_and_a_table_for_each_plot() -> None:
    hardware = {"cpu": "a cpu", "cores": 2, "load_before": 0.1}
    facts = {"date": "today", "model": "tiny", "rounds": 5, "commit": "0" * 40, "changed_since_commit": False}
    facts["compiled"] = True
    spread = {"p50": 1.0, "p95": 2.0, "p99": 3.0, "max": 4.0}
    one = {"gap_ms": spread, "ttft_long_ms": 9.5}
    systems = {"latency-target": one, "llama-server": one}
    figures = {"systems": systems, "targets": {"gap_p95_ms": {"value": 2.0, "target": 1.5, "is_met": False}}}
    page = results_page().describe({"itl_under_prefill": {"hardware": hardware, "figures": figures, **facts}})
    assert "5 rounds, compiled ticks, 2 cores" in page
    assert "| gap_p95_ms | 2 | 1.5 | **no** |" in page
    assert "| latency-target | 1 | 2 |" in page
    assert "(ttft_under_streams.svg)" in page


def results_page() -> Any:
    """Return the module `bench/results_page.py`, which no package contains."""
    spec = importlib.util.spec_from_file_location("results_page", ROOT / "bench" / "results_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_output_of_a_json_schema_matches_it() -> None:
    figures = run_quickly("json_schema_coverage")
    assert figures["faults"] == []
    assert figures["compiled"] + figures["refused"] == figures["schemas"]
    assert figures["compiled"] > figures["refused"]
    assert figures["outputs_valid"] == figures["outputs_complete"] > 0


def test_the_schemas_and_instances_of_a_suite_are_checked(tmp_path: Path) -> None:
    suite, store = tmp_path / "suite", tmp_path / "store"
    suite.mkdir()
    store.mkdir()
    number = {"type": "object", "properties": {"a": {"type": "integer"}, "b": True}}
    tests = [
        {"description": "in order", "data": {"a": 1, "b": 2}, "valid": True},
        {"description": "in another order, with a fraction", "data": {"b": 2, "a": 1.0}, "valid": True},
        {"description": "a character that no output has", "data": {"c": "\1"}, "valid": True},
        {"description": "a text", "data": {"a": "1"}, "valid": False},
        {"description": "not told by this grammar", "data": {"a": 1}, "valid": False},
    ]
    cases = [{"schema": number, "tests": tests}, {"schema": {"not": {}}, "tests": tests}, {"schema": True, "tests": []}]
    (suite / "cases.json").write_text(json.dumps(cases))
    (suite / "no_schema.json").write_text('{"a": 1}')
    (store / "catalogue.json").write_text(json.dumps({"record": number, "list": {"type": "array"}}))
    figures = run_quickly("json_schema_suites", str(suite), str(store))
    found, stored = figures["suites"].values()
    assert [found[name] for name in ("schemas", "accepted", "refused", "failed", "boolean")] == [3, 1, 1, 0, 1]
    assert found["reasons"] == {"not": 1}
    assert [found[name] for name in ("valid", "only_respelled", "wrong_rejects")] == [3, 1, 1]
    assert [found[name] for name in ("invalid", "wrong_accepts")] == [2, 1]
    assert "not told by this grammar" in found["deviations"]["wrong_accepts"][0]
    assert "a character that no output has" in found["deviations"]["wrong_rejects"][0]
    assert stored["schemas"] == stored["accepted"] == stored["plain"] == 2
    assert_spread(stored["compile_ms"])
    assert_spread(stored["untried_ms"])
    assert figures["sampled"]["schemas"] == figures["sampled"]["compiled"] == 1
    assert figures["sampled"]["faults"] == []


def test_the_cost_of_a_new_json_schema_and_of_its_masks_is_measured() -> None:
    figures = run_quickly("json_schema_masks")
    for name in ("new_schema_ms", "again_ms", "mask_ms"):
        assert_spread(figures[name])


def test_the_first_tokens_of_jobs_with_and_without_a_schema_are_measured() -> None:
    figures = run_quickly("json_schema_first_token")
    assert figures["ttft_ms"].keys() == {"none", "new", "again", "new_unusual", "new_tried"}
    for one in figures["ttft_ms"].values():
        assert_spread(one)
    assert figures["added_ms"].keys() == figures["ttft_ms"].keys() - {"none"}


def test_the_scores_of_a_prompt_are_those_of_the_logits_of_llama_cpp_python() -> None:
    figures = run_quickly("prompt_scoring")
    assert figures["largest_difference"] < 0.1
    assert figures["tokens_per_s"].keys() == {"plain", "scored", "llama_cpp_python"}


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads the memory of processes from /proc")
def test_the_memory_of_a_worker_is_measured_over_many_jobs() -> None:
    figures = run_quickly("worker_memory")
    assert [step["jobs"] for step in figures["steps"]] == list(range(0, figures["jobs"] + 1, figures["jobs"] // 10))
    assert 0 < figures["bare_mb"] < figures["steps"][0]["resident_mb"]
    assert figures["targets"]["over_bare_mb"]["is_met"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads the processes of /proc")
def test_an_interrupted_benchmark_leaves_no_process_behind() -> None:
    command = [sys.executable, str(ROOT / "bench" / "overhead.py"), "--model", "demo", "--rounds", "100"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert running.stderr is not None
        first_lines = (running.stderr.readline() for _ in range(3))
        assert any("at once" in line for line in first_lines)  # printed when all processes run
        children = children_of(running.pid)
        assert len(children) >= 2  # Redis and a worker
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=TIMEOUT_S)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 130
    assert not [pid for pid in children if is_alive(pid)]


def children_of(parent: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if (fields := stat_of(pid)) and int(fields[1]) == parent]


def is_alive(pid: int) -> bool:
    fields = stat_of(pid)
    return fields is not None and fields[0] != "Z"


def stat_of(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat, beginning with the state, or None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
