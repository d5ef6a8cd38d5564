# Image of Tiller. It has not been built: the tests only check its paths and its shell.
#
#   docker build --build-arg DEVICE=cpu --tag tiller:cpu .
#   docker build --build-arg DEVICE=cuda --tag tiller:cuda .
#
# The CUDA builds of torch and vLLM bring CUDA's libraries; the host's container runtime brings the
# driver. Give a run enough shared memory, for example docker run --gpus all --shm-size 64g.
FROM python:3.11-slim

ARG DEVICE=cpu

# a compiler for torch.compile and triton; libnuma for vLLM on CPU; git for the commit of a run
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tiller
COPY LICENSE README.md pyproject.toml constraints.txt ./
COPY scripts scripts
COPY configs configs
COPY rl rl
RUN TILLER_DEVICE=$DEVICE scripts/setup.sh

ENV PATH=/opt/tiller/.venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
CMD ["tiller", "--help"]
