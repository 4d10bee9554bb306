# lowtide's server, without a GPU. Memory budgets come from the container's limit:
#
#     docker build -t lowtide .
#     docker run --memory 16g -p 8000:8000 -e LOWTIDE_API_KEY=secret -v lowtide:/home/lowtide/.cache \
#         lowtide serve Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M
#
# Every option is a variable (docs/options.md). SIGTERM gives running answers 30 s to finish.

FROM python:3.13-slim AS wheel
WORKDIR /source
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
COPY constraints.txt /tmp/
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /tmp/constraints.txt uv \
    && uv pip install --system --no-cache --torch-backend cpu -c /tmp/constraints.txt \
        "lowtide[serve] @ file://$(ls /wheels/*.whl)" \
    && useradd --create-home --uid 10001 lowtide \
    && install --directory --owner=lowtide --group=lowtide /home/lowtide/.cache
USER 10001
WORKDIR /home/lowtide
VOLUME ["/home/lowtide/.cache"]
ENV LOWTIDE_HOST=0.0.0.0 LOWTIDE_PORT=8000
EXPOSE 8000
STOPSIGNAL SIGTERM
# A model that is first fetched from the hub takes its time.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --start-interval=5s \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['LOWTIDE_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["lowtide"]
CMD ["serve", "demo:autoregressive"]
