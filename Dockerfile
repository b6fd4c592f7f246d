# The server with everything it was qualified with: CPython 3.12, torch 2.11.0 (CUDA 13, its libraries come in the wheels),
# triton 3.6.0. The host brings the driver (580 or newer) and the container toolkit.
#
#   docker build -t hallmark .
#   docker run --gpus all -p 8000:8000 -v hallmark-cache:/var/cache/hallmark hallmark
#
# A release pins the base by digest: --build-arg PYTHON_IMAGE=python:3.12-slim-bookworm@sha256:...
# For machines without a GPU: --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm
#   --build-arg LOCK=requirements-cpu.lock --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG LOCK=requirements.lock
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/hallmark
WORKDIR /src
# The lock alone first: this layer (several GB) is built again only when a pin changes.
COPY deploy/${LOCK} deploy/
RUN /opt/hallmark/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement "deploy/${LOCK}"
COPY pyproject.toml README.md LICENSE ./
COPY hallmark hallmark
COPY kernels kernels
COPY qualification qualification
COPY server server
# setuptools is in the lock (torch needs it), so nothing unpinned takes part in the build.
RUN /opt/hallmark/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/hallmark/bin/pip check

FROM ${PYTHON_IMAGE} AS base
LABEL org.opencontainers.image.title="hallmark" \
      org.opencontainers.image.description="An LLM inference server that can prove which attention kernel served every request" \
      org.opencontainers.image.licenses="Apache-2.0"
# tini: the server starts an engine process, and both start compilers; somebody must reap them.
# Not pinned: Debian removes superseded versions, so an exact pin stops building at the next security fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=10001 --group=10001 /var/cache/hallmark
COPY --from=build /opt/hallmark /opt/hallmark
# The cache is the only place written to (evidence, compiled kernels, downloads, temporary files), so the root file system
# can be read-only: --read-only -v hallmark-cache:/var/cache/hallmark
# USER: torch asks for the user's name when it is imported, and ends the engine where a number has none.
ENV PATH=/opt/hallmark/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/hallmark \
    USER=hallmark \
    TMPDIR=/var/cache/hallmark \
    TRITON_CACHE_DIR=/var/cache/hallmark/triton \
    HALLMARK_CACHE_DIR=/var/cache/hallmark/evidence \
    HALLMARK_HOST=0.0.0.0 \
    HALLMARK_PORT=8000
WORKDIR /var/cache/hallmark
VOLUME /var/cache/hallmark
EXPOSE 8000
STOPSIGNAL SIGTERM
# Ready, not merely alive; the start period covers loading, qualification and compilation.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ['HALLMARK_PORT']}/readyz\", timeout=4)"]
ENTRYPOINT ["tini", "--", "hallmark"]
CMD ["serve"]

# Without a compiler: every kernel comes from triton-cache/, which the image below has filled on a GPU of the same kind (see
# docs/operate.md, "Without a C compiler"). Built by docker build --target sealed only.
FROM base AS sealed
# Where it was filled: triton writes full paths into its cache.
COPY --chown=10001:10001 triton-cache /opt/hallmark/triton
ENV TRITON_CACHE_DIR=/opt/hallmark/triton
USER 10001:10001

FROM base AS runtime
# gcc and the C headers: triton compiles the launcher of each kernel with a C compiler at run time. Python's own headers
# come with the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
