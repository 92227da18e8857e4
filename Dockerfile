# syntax=docker/dockerfile:1

# A llamaq worker. Without arguments it runs on any x86-64 CPU with AVX2, or any 64-bit ARM. For an NVIDIA GPU:
#   --build-arg BUILD_IMAGE=nvidia/cuda:12.8.1-devel-ubuntu24.04
#   --build-arg RUNTIME_IMAGE=nvidia/cuda:12.8.1-runtime-ubuntu24.04
#   --build-arg CMAKE_ARGS=-DGGML_CUDA=ON
# llama.cpp then has machine code for the RTX 30, 40 and 50 series and their relatives (A10, L4, L40). For other GPUs,
# such as A100 and H100, the driver compiles it in every new container. To avoid that, name the architecture of your
# GPU. The build is then shorter, too. For an H100:
#   --build-arg CMAKE_ARGS="-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90"
# Both images must be Debian or Ubuntu of the same release: the virtual environment moves from one to the other.
ARG BUILD_IMAGE=debian:bookworm-slim
ARG RUNTIME_IMAGE=debian:bookworm-slim

FROM ${BUILD_IMAGE} AS build
ENV DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/llamaq

# llama.cpp is a separate layer. It takes minutes, and is built again only when its version or its arguments change.
# GGML_NATIVE must stay off: an image runs on other CPUs than the one that built it. llama-cpp-python switches on
# llama.cpp's `common` library, which belongs to the tools; a variable set before that wins. The wheel's second copy of
# the libraries, outside its package, is never loaded. In the package the wheel has each library under three names. Two
# of them become links, because a library for CUDA has hundreds of megabytes.
ARG LLAMA_CPP_PYTHON="llama-cpp-python>=0.3.36,<0.3.37"
ARG CMAKE_ARGS=""
RUN echo 'set(LLAMA_BUILD_COMMON OFF)' > /tmp/leave-out.cmake \
    && CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_OPENSSL=OFF \
        -DCMAKE_PROJECT_INCLUDE=/tmp/leave-out.cmake ${CMAKE_ARGS}" \
    /opt/llamaq/bin/pip install "${LLAMA_CPP_PYTHON}" \
    && rm -rf /opt/llamaq/lib/python3*/site-packages/lib /opt/llamaq/lib/python3*/site-packages/include \
    && cd /opt/llamaq/lib/python3*/site-packages/llama_cpp/lib \
    && for copy in *.so.*; do ln --symbolic --force "${copy%%.so.*}.so" "$copy"; done

COPY pyproject.toml LICENSE README.md /src/
COPY common /src/common
COPY producer /src/producer
COPY worker /src/worker
# The hook compiles the modules that run in each tick: worker/pyproject.toml.
RUN HATCH_BUILD_HOOKS_ENABLE=true /opt/llamaq/bin/pip install '/src[worker,hub,metrics,serve,top]' /src/worker /src/producer

FROM ${RUNTIME_IMAGE}
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home llamaq \
    && install --directory --owner llamaq --group llamaq /home/llamaq/.cache /home/llamaq/.cache/huggingface
COPY --from=build /opt/llamaq /opt/llamaq

# The driver stores the code that it compiles in CUDA_CACHE_PATH. By default that is ~/.nv, which the Helm chart mounts
# read-only, so that each start of a worker process would compile again.
ENV PATH=/opt/llamaq/bin:$PATH PYTHONUNBUFFERED=1 CUDA_CACHE_PATH=/home/llamaq/.cache/cuda
USER llamaq
WORKDIR /home/llamaq

HEALTHCHECK --interval=10s --timeout=10s --start-period=120s --retries=3 \
    CMD ["llamaq", "health"]
# A worker that crashes leaves the process that compiles grammars. If process 1 does not wait for its end, it remains as a
# zombie. tini waits; Kubernetes has nothing like `docker run --init`. With `-s`, tini may also be another process than 1.
ENTRYPOINT ["tini", "-s", "--", "llamaq"]
CMD ["worker"]
