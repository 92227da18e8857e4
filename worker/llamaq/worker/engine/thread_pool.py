"""llama.cpp's threads: on which CPUs they run, with which priority, and how they wait for the next step.

The engine thread is one of them. It starts other threads of the worker too, and these must not inherit its CPUs and its
priority. So it takes them when its ticks begin (`ThreadPool.place_this_thread`), and not while the model is loaded
(`keeping_placement`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llama_cpp

from llamaq.common.errors import EngineError
from llamaq.worker.cpu_cores import usable_cpus
from llamaq.worker.engine.ggml_functions import declare
from llamaq.worker.thread_settings import DEFAULT_POLL, MAX_THREADS


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """Options of llama.cpp's threads, see `ThreadSettings`."""

    cpus: frozenset[int] = frozenset()
    is_strict: bool = False
    priority: int = 0
    poll: int = DEFAULT_POLL


class ThreadPool:
    """The threads of one llama_context: a ggml_threadpool. The garbage collection of this object frees them.

    Without OpenMP, the thread that makes the pool gets its CPUs and its priority, see `keeping_placement`.

    Args:
        options: The options.
        n_threads: The largest number of threads of a decode. With more, llama.cpp would write to wrong addresses.

    Raises:
        EngineError: The system does not allow the CPUs or the priority, or this build of llama.cpp has no such option.
    """

    def __init__(self, options: ThreadOptions, n_threads: int) -> None:
        self._cpus = sorted(_allowed(options.cpus))
        self._is_strict = options.is_strict
        self._policy = _policy_of(options.priority)
        if uses_openmp() and options.poll != DEFAULT_POLL:
            raise EngineError(
                "--poll (LLAMAQ_POLL): this llama.cpp is built with OpenMP, whose threads wait as the variable "
                "OMP_WAIT_POLICY says; build it with CMAKE_ARGS=-DGGML_OPENMP=OFF"
            )
        library = _declared_library()
        params = _ThreadPoolParams()
        library.ggml_threadpool_params_init(params, n_threads)
        if (params.n_threads, params.poll) != (n_threads, DEFAULT_POLL):
            raise EngineError("ggml_threadpool_params has another layout; install a supported llama-cpp-python")
        for cpu in self._cpus:
            params.cpumask[cpu] = True
        params.strict_cpu, params.prio, params.poll = options.is_strict, options.priority, options.poll
        self.n_threads = n_threads
        self._pointer = library.ggml_threadpool_new(params)
        if not self._pointer:
            raise EngineError(f"llama.cpp cannot start {n_threads} threads")
        weakref.finalize(self, library.ggml_threadpool_free, self._pointer)

    def attach(self, context: Any) -> None:
        """Let a llama_context compute with these threads. The pool must live as long as the context."""
        attach = llama_cpp.llama_cpp._lib.llama_attach_threadpool
        attach.argtypes, attach.restype = [ctypes.c_void_p] * 3, None
        attach(context, self._pointer, None)

    def place_this_thread(self) -> None:
        """Let the calling thread run on the CPUs and with the priority of the pool. It is the first of its threads."""
        if self._cpus:
            # llama.cpp gives the first thread the first place with OpenMP, otherwise the last one.
            place = 0 if uses_openmp() else self.n_threads - 1
            os.sched_setaffinity(0, {self._cpus[place % len(self._cpus)]} if self._is_strict else self._cpus)
        if self._policy is not None:
            os.sched_setscheduler(0, *self._policy)


def make_thread_pool(options: ThreadOptions, n_threads: int) -> ThreadPool | None:
    """Return the threads of a context. None: OpenMP provides them, and no option says more. Raises `EngineError`.

    Without OpenMP and without a pool, llama.cpp would start new threads for each decode.
    """
    return None if uses_openmp() and options == ThreadOptions() else ThreadPool(options, n_threads)


def uses_openmp() -> bool:
    """Return whether llama.cpp is built with OpenMP, whose threads ignore `poll`."""
    return "OPENMP = 1" in llama_cpp.llama_print_system_info().decode()


@contextmanager
def keeping_placement() -> Iterator[None]:
    """Give the calling thread back its CPUs and its priority at the end of the block. llama.cpp may change them."""
    if not hasattr(os, "sched_setaffinity"):  # not on Linux
        yield
        return
    cpus, policy, param = os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, param)


def _allowed(cpus: frozenset[int]) -> frozenset[int]:
    """Return those of the CPUs that this process may use. Raises `EngineError` if there is none."""
    if not cpus or not hasattr(os, "sched_getaffinity"):
        return cpus
    allowed = usable_cpus(cpus)
    if not allowed:
        raise EngineError(
            "--cpu-mask, --cpu-range (LLAMAQ_CPU_MASK, LLAMAQ_CPU_RANGE): this process may use none of these CPUs, but "
            f"only {', '.join(map(str, sorted(usable_cpus())))}"
        )
    return allowed


def _policy_of(priority: int) -> tuple[int, os.sched_param] | None:
    """Return the policy and the priority of Linux for a priority of llama.cpp. None: it stays as it is.

    Raises:
        EngineError: The system does not allow it.
    """
    if priority == 0 or not hasattr(os, "sched_setscheduler"):
        return None
    # ggml_thread_apply_priority in ggml-cpu.c
    number = {-1: 0, 1: 40, 2: 80, 3: 90}[priority]
    policy = os.SCHED_BATCH if priority < 0 else os.SCHED_FIFO, os.sched_param(number)
    refused: list[OSError] = []

    def try_policy() -> None:
        try:
            os.sched_setscheduler(0, *policy)
        except OSError as exc:
            refused.append(exc)

    thread = threading.Thread(target=try_policy)  # so that the calling thread stays as it is
    thread.start()
    thread.join()
    if refused:
        raise EngineError(
            f"--prio (LLAMAQ_PRIO): the system does not allow the priority {priority}: {refused[0].strerror}. "
            "Real-time priorities need CAP_SYS_NICE, or a limit of rtprio (LimitRTPRIO in a systemd service)"
        )
    return policy


class _ThreadPoolParams(ctypes.Structure):
    """ggml_threadpool_params"""

    _fields_ = (
        ("cpumask", ctypes.c_bool * MAX_THREADS),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


def _declared_library() -> Any:
    """Return ggml's library, with the C types of the functions for thread pools."""
    params, pool = ctypes.POINTER(_ThreadPoolParams), ctypes.c_void_p
    return declare(
        {
            "ggml_threadpool_params_init": ([params, ctypes.c_int], None),
            "ggml_threadpool_new": ([params], pool),
            "ggml_threadpool_free": ([pool], None),
        }
    )
