# gpu-plugin in a virtual environment, on a public Python image without a shell. Both bases have the same minor version of Python.
# Other bases: --build-arg BUILD_BASE=... BASE=... PYTHON=PATH (the interpreter in BASE). A mirror: --build-arg PIP_INDEX_URL=...,
# or --secret id=pip.conf,src=... and --secret id=ca.pem,src=... with "cert = /run/secrets/ca.pem" in that pip.conf.
ARG BUILD_BASE=docker.io/library/python:3.13-slim-trixie@sha256:3dd7cc108ec1493442514f5c2a871af6af0ec31d768ff6e378a93340c3b3db5f
ARG BASE=gcr.io/distroless/python3-debian13:nonroot@sha256:774595d652a294b54c9bd575b2d9fdd1a4b47547dc17b8bfa4c0e953c64855b3

FROM ${BUILD_BASE} AS build
ARG PIP_INDEX_URL
ARG PYTHON=/usr/bin/python3
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
WORKDIR /source
COPY requirements/build.lock requirements/run.lock ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /build && python3 -m venv --without-pip /opt/gpu-plugin \
    && /build/bin/python -m pip install --require-hashes --only-binary :all: --no-deps -r build.lock \
    && /build/bin/python -m pip --python /opt/gpu-plugin install --require-hashes --only-binary :all: --no-deps --no-compile -r run.lock
COPY pyproject.toml README.md LICENSE ./
COPY gpu_plugin gpu_plugin
# The last line makes the environment run on the interpreter of BASE.
RUN /build/bin/hatchling build --target wheel --directory /wheels \
    && /build/bin/python -m pip --python /opt/gpu-plugin install --no-index --no-compile --no-deps --find-links /wheels gpu-plugin \
    && /build/bin/cyclonedx-py environment --spec-version 1.6 --output-reproducible -o /opt/gpu-plugin/sbom.cdx.json /opt/gpu-plugin \
    && ln -sf "$PYTHON" /opt/gpu-plugin/bin/python3 && sed -i "s|^home = .*|home = ${PYTHON%/*}|" /opt/gpu-plugin/pyvenv.cfg

FROM ${BASE}
ARG VERSION REVISION CREATED
LABEL org.opencontainers.image.title="gpu-plugin" org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="Async NVIDIA GPU device plugin for Kubernetes" \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
ENV PATH=/opt/gpu-plugin/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_DISABLE_REQUIRE=true
COPY --from=build /opt/gpu-plugin /opt/gpu-plugin
USER 0:0
# The root file system of the container is read-only: bytecode is compiled here, for the standard library too. The last path has our code.
RUN ["python3", "-IBc", "import compileall as c, sys; mode = c.py_compile.PycInvalidationMode.UNCHECKED_HASH; sys.exit(not [c.compile_dir(path, quiet=2, invalidation_mode=mode) for path in sys.path][-1])"]
USER 65532:65532
WORKDIR /
ENTRYPOINT ["gpu-plugin"]
CMD ["run"]
