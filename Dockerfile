# Both images of the project: `--target operator` (no torch inside) and `--target runtime`.
#
# The layers of an image, from rarely to often changed: Python, the locked dependencies (gigabytes for the runtime), our
# own code (megabytes). Files pass between stages by COPY, which builders cache by content: the dependency layer is made
# anew only when the lock file's part for that image changes, the code layer only when the code does.

ARG PYTHON=python:3.11-slim

# ---- tools: what builds, and never ships
FROM ${PYTHON} AS tools
ARG UV_VERSION=0.13.8
ARG HATCHLING_VERSION=1.27.0
RUN python3 -m venv /opt/tools \
 && /opt/tools/bin/pip install --no-cache-dir uv==${UV_VERSION} hatchling==${HATCHLING_VERSION}
ENV PATH=/opt/tools/bin:$PATH

# ---- lock: the locked dependencies of each image as plain lists; the fixed time keeps equal lists equal files
FROM tools AS lock
WORKDIR /src
COPY pyproject.toml uv.lock ./
RUN for image in operator runtime; do \
      uv export --frozen --no-dev --no-emit-project --no-header --extra $image --output-file /locks/$image.txt >/dev/null; \
    done \
 && touch --date=@0 /locks /locks/*

# ---- code: an environment that holds our wheel and nothing else
FROM tools AS code
WORKDIR /src
COPY pyproject.toml README.md ./
COPY crds crds
COPY operator operator
COPY runtime runtime
RUN uv build --wheel --no-build-isolation --out-dir /wheel \
 && uv venv /opt/speccache \
 && uv pip install --python /opt/speccache --no-deps --no-index --compile-bytecode /wheel/*.whl

# ---- operator
FROM ${PYTHON} AS operator
# Numbers, no names: no such user exists in the image, and nothing but /tmp needs to be writable.
ENV PATH=/opt/speccache/bin:$PATH HOME=/tmp USER=speccache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENTRYPOINT ["speccache-operator"]
ARG UV_CACHE_DIR=/root/.cache/uv
COPY --from=lock /locks/operator.txt /opt/speccache.lock/
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=cache,target=/root/.cache/uv \
    /opt/tools/bin/uv venv /opt/speccache \
 && /opt/tools/bin/uv pip install --python /opt/speccache --require-hashes --link-mode=copy --compile-bytecode \
      -r /opt/speccache.lock/operator.txt
USER 65532:65532
COPY --from=code /opt/speccache /opt/speccache

# ---- runtime
FROM ${PYTHON} AS runtime
# Numbers, no names: no such user exists in the image, and nothing but /tmp needs to be writable.
ENV PATH=/opt/speccache/bin:$PATH HOME=/tmp USER=speccache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENTRYPOINT ["speccache-runtime"]
ARG UV_CACHE_DIR=/root/.cache/uv
COPY --from=lock /locks/runtime.txt /opt/speccache.lock/
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=cache,target=/root/.cache/uv \
    /opt/tools/bin/uv venv /opt/speccache \
 && /opt/tools/bin/uv pip install --python /opt/speccache --require-hashes --link-mode=copy --compile-bytecode \
      -r /opt/speccache.lock/runtime.txt
USER 65532:65532
COPY --from=code /opt/speccache /opt/speccache
