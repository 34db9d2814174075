# Two images from one file:
#   docker build --target router -t tandem/router:0.1.0 .     (small, no torch)
#   docker build --target engine -t tandem/engine:0.1.0 .     (prefill and decode nodes)
# Both run as user 10001, write to /tmp, /cache and /models only, and take SIGTERM. They run as any
# other user, too: libraries that ask for its name find LOGNAME.
# Bases are pinned by tag; a release pins them by digest: --build-arg PYTHON_BASE=python@sha256:...
ARG PYTHON_BASE=python:3.12.11-slim-bookworm

# The wheel, and nothing that made it.
FROM ${PYTHON_BASE} AS wheel
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# The router's environment: what it imports, not what engines need.
FROM ${PYTHON_BASE} AS router-environment
RUN python -m venv /opt/tandem
COPY --from=wheel /wheels /wheels
RUN /opt/tandem/bin/pip install --no-cache-dir \
        "aiohttp>=3.11,<4" \
        "fastapi>=0.115,<1" \
        "grpcio>=1.76,<2" \
        "grpcio-health-checking>=1.76,<2" \
        "httptools>=0.6,<1" \
        "msgspec>=0.19,<1" \
        "prometheus-client>=0.21,<1" \
        "protobuf>=6.31.1,<8" \
        "pydantic-settings>=2.7,<3" \
        "rich>=13.9,<16" \
        "uvicorn>=0.32,<1" \
        "uvloop>=0.21,<1" \
        "xxhash>=3.5,<5" \
    && /opt/tandem/bin/pip install --no-cache-dir --no-deps /wheels/*.whl

# Everything, Ray for nodes that span hosts, FlashAttention 3; torch brings CUDA's libraries along.
FROM ${PYTHON_BASE} AS engine-environment
RUN python -m venv /opt/tandem
COPY --from=wheel /wheels /wheels
RUN /opt/tandem/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[ray,fa3]"

FROM ${PYTHON_BASE} AS base
LABEL org.opencontainers.image.title="tandem" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="LLM serving with prefill and decode on separate hosts"
RUN groupadd --gid 10001 tandem \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tandem
COPY LICENSE /licenses/LICENSE
ENV PATH=/opt/tandem/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1 \
    HOME=/tmp \
    LOGNAME=tandem
WORKDIR /tmp
STOPSIGNAL SIGTERM
ENTRYPOINT ["tandem"]

FROM base AS router
COPY --from=router-environment /opt/tandem /opt/tandem
USER 10001:10001
EXPOSE 8000 8001
CMD ["router", "--help"]

FROM base AS engine
# Triton compiles a launcher in C for each kernel, against Python's headers, which the base has.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=engine-environment /opt/tandem /opt/tandem
RUN install --directory --owner 10001 --group 10001 /cache /models
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HF_HOME=/models \
    TRITON_CACHE_DIR=/cache/triton
USER 10001:10001
EXPOSE 8100 8101 8200
CMD ["decode", "--help"]
