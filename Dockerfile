# Two images from one file:
#   docker build --target router -t tandem/router:0.2.0 .     (small, no torch)
#   docker build --target engine -t tandem/engine:0.2.0 .     (prefill and decode nodes)
# Both run as user 10001, write to /tmp, /cache and /models only, and take SIGTERM. They run as any
# other user, too: libraries that ask for its name find LOGNAME.
#
# For amd64 and arm64. All but FlashAttention 3 has wheels for both: engines on arm64 (Grace) use
# Triton's attention for every prompt.
#
# The digest is that of the tag's index of both architectures; `make release-bases` asks for newer ones.
# Python's packages come by their hashes from requirements/*.lock. With SOURCE_DATE_EPOCH and BuildKit's
# rewrite-timestamp (`make release` sets both) an image depends on nothing but these inputs and, for
# the engine's, what Debian's archive has for gcc that day.
ARG PYTHON_BASE=python:3.12.14-slim-bookworm@sha256:392307d22300de8b5986851a12d9176dfc0fc073e65bf6523ebd7dcbeb23564e

# An environment without pip, and the pip of the base to fill it.
FROM ${PYTHON_BASE} AS environment
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_COMPILE=1 \
    PIP_ONLY_BINARY=:all: \
    PIP_REQUIRE_HASHES=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1
RUN python -m venv --without-pip /opt/tandem
WORKDIR /src

# The wheel, and nothing that made it.
FROM environment AS wheel
COPY requirements/build.lock requirements/build.lock
RUN python -m pip install -r requirements/build.lock
COPY . .
ARG SOURCE_DATE_EPOCH
RUN python -m hatchling build --target wheel --directory /wheels

# The router's environment: what it imports, not what engines need.
FROM environment AS router-environment
COPY requirements/image-router.lock requirements/image-router.lock
RUN python -m pip --python /opt/tandem/bin/python install -r requirements/image-router.lock
COPY --from=wheel /wheels /wheels
# Bytecode without times in it: the root file system is read-only, and images are compared.
RUN PIP_REQUIRE_HASHES=0 python -m pip --python /opt/tandem/bin/python \
        install --no-index --no-deps /wheels/*.whl \
    && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/tandem/lib

# Everything, Ray for nodes that span hosts, FlashAttention 3; torch brings CUDA's libraries along.
FROM environment AS engine-environment
COPY requirements/image-engine.lock requirements/image-engine.lock
RUN python -m pip --python /opt/tandem/bin/python install -r requirements/image-engine.lock
COPY --from=wheel /wheels /wheels
RUN PIP_REQUIRE_HASHES=0 python -m pip --python /opt/tandem/bin/python \
        install --no-index --no-deps /wheels/*.whl \
    && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/tandem/lib

FROM ${PYTHON_BASE} AS base
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
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tandem" \
      org.opencontainers.image.description="LLM serving with prefill and decode on separate hosts" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM base AS router
COPY --from=router-environment /opt/tandem /opt/tandem
USER 10001:10001
EXPOSE 8000 8001
CMD ["router", "--help"]

FROM base AS engine
# Triton compiles its driver and a launcher in C at run time, against Python's headers, which the base
# has; ptxas comes with its wheel. The rest is what Mooncake's store loads.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libcurl4 libibverbs1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* /var/cache/ldconfig/aux-cache /var/log/*
COPY --from=engine-environment /opt/tandem /opt/tandem
RUN install --directory --owner 10001 --group 10001 /cache /models
# Containers see the GPUs that they are given: `all` here would be a wish of those that ask for none,
# such as the download of a model, and hosts where only device plugins give GPUs do not start these.
# GKE has the driver's libraries in a folder of its own, which nothing else tells the loader of.
ENV NVIDIA_VISIBLE_DEVICES=void \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    HF_HOME=/models \
    TRITON_CACHE_DIR=/cache/triton
USER 10001:10001
EXPOSE 8100 8101 8200
CMD ["decode", "--help"]
