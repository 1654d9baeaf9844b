# A server for Linux: docker build -t reprise . && docker run -p 127.0.0.1:8080:8080 -v reprise:/data reprise MODEL
# For other machines: -p 8080:8080, and --api-key KEY behind MODEL. For other containers: --allowed-host NAME.
# MLX: "cpu", or "cuda" for GPUs of NVIDIA's (docker build --build-arg MLX=cuda, docker run --gpus all).
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG MLX=cpu
# MLX compiles its kernels for the CPU when it runs.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[$MLX]" && rm -r /wheels \
    && useradd --create-home reprise && mkdir /data && chown reprise /data
USER reprise
# Models from the hub, and what is kept of chats.
ENV HF_HOME=/data/models REPRISE_DISK_CACHE=/data/chats REPRISE_HOST=0.0.0.0 REPRISE_LOG_FORMAT=json
VOLUME /data
EXPOSE 8080
HEALTHCHECK --start-period=10m CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/health/live')"
ENTRYPOINT ["reprise", "serve"]
