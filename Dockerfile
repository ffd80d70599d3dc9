# The image of gpu-plugin: an interpreter, what it loads, the wheels of requirements/run.lock, and nothing else of either base.
#
#   make image                                           for this machine's processor
#   docker buildx build --platform linux/amd64,linux/arm64 .
#
# BASE      has python3 with venv and pip's wheel, ldconfig, and a shell; nothing of it is in the image.
# RUN_BASE  is where the interpreter, its standard library and the C library are taken from: the same minor version of Python,
#           glibc, at /usr/local/bin/python3 or /usr/bin/python3. It may be without a shell, such as a distroless Python.
# A private mirror: --build-arg PIP_INDEX_URL=..., or --secret id=pip.conf,src=... and, for its certificate authority,
# --secret id=ca.pem,src=... with `cert = /run/secrets/ca.pem` in that pip.conf. No trace of them is in the image.
# VERSION, REVISION and CREATED are labels of the image; SOURCE_DATE_EPOCH is the time of all its files:
# the same sources and bases give the same layer, byte for byte.
ARG BASE=docker.io/library/python:3.13-slim-trixie
ARG RUN_BASE=${BASE}

FROM ${RUN_BASE} AS run-base

FROM ${BASE} AS build
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
WORKDIR /source

# What builds: pip itself, hatchling, the maker of the bill of materials; each by hash.
COPY requirements/build.lock requirements/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /build \
    && /build/bin/python -m pip install --require-hashes --only-binary :all: --no-deps --requirement requirements/build.lock

# What runs.
COPY requirements/run.lock requirements/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv --without-pip --symlinks /opt/gpu-plugin \
    && /build/bin/python -m pip --python /opt/gpu-plugin/bin/python3 \
       install --require-hashes --only-binary :all: --no-deps --requirement requirements/run.lock

# gpu-plugin itself, by its name and not by its path, so that no record of the path stays behind.
COPY pyproject.toml README.md LICENSE ./
COPY gpu_plugin gpu_plugin
RUN /build/bin/hatchling build --target wheel --directory /wheels \
    && /build/bin/python -m pip --python /opt/gpu-plugin/bin/python3 install --no-index --no-deps --find-links /wheels gpu-plugin

# The bill of materials, of what is installed; then the root directory of the image, which adds what is taken of the base.
RUN /build/bin/cyclonedx-py environment /opt/gpu-plugin/bin/python3 --pyproject pyproject.toml --mc-type application \
    --spec-version 1.6 --output-reproducible --output-format JSON --output-file /source/sbom.cdx.json
COPY image/assemble.py image/
ARG SOURCE_DATE_EPOCH
ARG VERSION
COPY --from=run-base / /run-base
RUN /opt/gpu-plugin/bin/python3 image/assemble.py --base /run-base --environment /opt/gpu-plugin --sbom sbom.cdx.json \
    --version "${VERSION}" /image \
    && /build/bin/python -c 'import sys; from cyclonedx.schema import SchemaVersion; from cyclonedx.validation.json import \
JsonStrictValidator as Judge; sys.exit(Judge(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()))' \
       /image/usr/share/gpu-plugin/sbom.cdx.json

FROM scratch
ARG VERSION
ARG REVISION
ARG CREATED
LABEL org.opencontainers.image.title="gpu-plugin" \
      org.opencontainers.image.description="Async NVIDIA GPU device plugin for Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
COPY --from=build /image /
# What NVIDIA's container runtime adds is for the pod to say: NVIDIA_VISIBLE_DEVICES=all here would give every GPU of the node
# to each container of this image, the test's and the uninstaller's too. The chart sets it for the plugin's container.
ENV PATH=/opt/gpu-plugin/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_DISABLE_REQUIRE=true
USER 65532:65532
WORKDIR /
ENTRYPOINT ["gpu-plugin"]
CMD ["run"]
