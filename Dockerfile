# docker build -t optimum-moonshot . && docker run --rm optimum-moonshot    # runs `make demo`
FROM python:3.11-slim
RUN apt-get update && apt-get install --no-install-recommends -y gcc libc6-dev make && rm -rf /var/lib/apt/lists/*
# On the usual index torch for Linux is the CUDA build, of several GB. --build-arg PIP_EXTRA_INDEX_URL=URL names another
# index; from one with CPU builds, pip prefers the release +cpu of the pinned version.
ARG PIP_EXTRA_INDEX_URL
WORKDIR /optimum-moonshot
COPY . .
RUN make .venv/.installed
CMD ["make", "demo"]
