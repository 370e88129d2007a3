# The server's image. `docs/docker.md` tells how to build and run it.
#
#   docker build -t headrace .                                       any machine; CUDA where there is a GPU
#   docker build -t headrace --build-arg TORCH=cpu \
#       --build-arg TORCH_INDEX_URL=<PyTorch's CPU index> .          a few GB smaller; CPUs only
#
# PYTHON_IMAGE: any glibc image that has python3 (3.11 or newer) with venv, and useradd.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm


# The packages: gigabytes, a layer of their own that a change of the sources leaves as it is.
FROM ${PYTHON_IMAGE} AS packages

# cuda: torch as the package index has it. cpu: torch from TORCH_INDEX_URL or deploy/wheels.
ARG TORCH=cuda
ARG TORCH_INDEX_URL=
# pip's own variables; unset, pip's defaults hold.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_CERT

# pip stays outside: the server's environment has none.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv --without-pip /opt/headrace && python3 -m venv /opt/tools
ENV PATH=/opt/headrace/bin:$PATH
WORKDIR /src

COPY constraints.txt deploy/dependencies.py deploy/requirements.lock ./
COPY deploy/wheels /wheels
# Everything with the hashes of the lock; a torch from elsewhere than the usual index has other ones.
RUN set -eu; \
    pip="/opt/tools/bin/pip --python /opt/headrace/bin/python"; \
    case "$TORCH" in \
    cuda) python dependencies.py locked requirements.lock > requirements.txt ;; \
    cpu) \
        if [ -n "$TORCH_INDEX_URL" ]; then set -- --index-url "$TORCH_INDEX_URL"; \
        elif ls /wheels/torch-*.whl >/dev/null 2>&1; then set -- --no-index; \
        else \
            echo "TORCH=cpu needs TORCH_INDEX_URL, PyTorch's index of CPU wheels, or a torch wheel in deploy/wheels" >&2; \
            exit 1; \
        fi; \
        $pip install --no-deps --constraint constraints.txt --find-links /wheels "$@" torch; \
        python dependencies.py locked requirements.lock --no-torch > requirements.txt ;; \
    *) echo "TORCH is '$TORCH'; it must be cpu or cuda" >&2; exit 1 ;; \
    esac; \
    $pip install --no-deps --require-hashes --requirement requirements.txt; \
    $pip check; \
    if [ "$TORCH" = cpu ]; then \
        python -c 'import torch; raise SystemExit(torch.version.cuda and "TORCH=cpu, but this torch is a CUDA build")'; \
    fi


FROM packages AS build

# Compiles the kernels for CPUs; an image of another distribution must bring its own compiler.
RUN command -v g++ >/dev/null || { \
        apt-get update && apt-get install --yes --no-install-recommends g++ \
        && rm -rf /var/lib/apt/lists/*; }

# setuptools, the build backend, is there already: torch depends on it.
COPY LICENSE README.md setup.py pyproject.toml ./
COPY clients/python/README.md clients/python/pyproject.toml clients/python/
COPY clients/python/src clients/python/src
COPY engine engine
COPY service service
COPY models/demo models/demo
# Under /own as it shall lie under /.
RUN python -m engine.native.build \
    && /opt/tools/bin/pip --python /opt/headrace/bin/python install --no-deps --no-build-isolation \
        --root /own ./clients/python .

COPY LICENSE deploy/healthcheck.py /own/opt/headrace/
# A checkout may have been made with a strict umask; the server's user must be able to read these.
RUN chmod -R a+rX /own


FROM ${PYTHON_IMAGE}

ARG TORCH=cuda

LABEL org.opencontainers.image.title="Headrace" \
      org.opencontainers.image.description="A gRPC microservice that serves text generation: continuous batching over a paged KV cache" \
      org.opencontainers.image.licenses="Apache-2.0"

# Fixed ids, so that volumes and `runAsNonRoot` can rely on them. /models: mount models here.
# /run/headrace: for Unix sockets.
RUN groupadd --gid 10001 headrace \
    && useradd --no-log-init --uid 10001 --gid 10001 --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin headrace \
    && mkdir -p /models /run/headrace \
    && chown headrace:headrace /run/headrace

# Triton compiles a small module in C when the kernels for CUDA devices are used first: that needs
# gcc, the C library's headers (which gcc only recommends), and Python's. Not in an image for CPUs,
# whose kernels are compiled above. That it works is tried here rather than on the first GPU.
RUN set -eu; \
    if [ "$TORCH" = cuda ]; then \
        set --; \
        command -v gcc >/dev/null && [ -e /usr/include/stdio.h ] || set -- gcc libc6-dev; \
        include=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])'); \
        [ -e "$include/Python.h" ] || set -- "$@" python3-dev; \
        if [ $# -gt 0 ]; then \
            apt-get update; \
            apt-get install --yes --no-install-recommends "$@"; \
            rm -rf /var/lib/apt/lists/*; \
        fi; \
        echo '#include <Python.h>' | gcc -shared -fPIC -I"$include" -x c - -o /dev/null; \
    fi

COPY --from=packages /opt/headrace /opt/headrace
COPY --from=build /own /

# Settings are variables rather than arguments of CMD: other arguments leave them in force, and the
# health check reads them too. INSECURE is what it says: plain text, until HEADRACE_TLS_CERT and
# HEADRACE_TLS_KEY are given. Everything that anybody writes goes to /tmp: the root file system may
# be read-only.
ENV PATH=/opt/headrace/bin:$PATH \
    HEADRACE_LISTEN=0.0.0.0:50051 \
    HEADRACE_INSECURE=1 \
    HOME=/tmp \
    HF_HOME=/tmp/huggingface \
    XDG_CACHE_HOME=/tmp/cache \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

USER 10001:10001
WORKDIR /tmp
# 8000: OpenAI's HTTP API, where HEADRACE_OPENAI=0.0.0.0:8000 is given.
EXPOSE 50051 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python3", "/opt/headrace/healthcheck.py"]
# Exec form: the command is PID 1 and gets the signals itself; it is an init to its server, too
# (service/command/entry.py). SIGTERM drains.
ENTRYPOINT ["headrace-server"]
CMD ["serve"]
