#!/usr/bin/env bash
# Builds the images, starts them with compose, scales them, and asks the server something, on a real Docker.
# Installs and starts Docker where it is missing (Debian, as root). Where no image registry is reachable, the base image
# that the Dockerfile names is made with debootstrap from the host's own package sources.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$(sed -n 's/^FROM \([^ ]*:[^ ]*\) AS python$/\1/p' Dockerfile)
export COMPOSE_PROJECT_NAME=pagebus-try COMPOSE_HTTP_TIMEOUT=300 DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0
say() { printf '== %s\n' "$*"; }

install_docker() {
  command -v dockerd >/dev/null && compose version >/dev/null 2>&1 && return
  say "installing Docker"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq docker.io docker-compose debootstrap >/dev/null
}

start_docker() {
  docker info >/dev/null 2>&1 && return
  say "starting dockerd"
  rm -f /var/run/docker.pid
  dockerd >/tmp/dockerd.log 2>&1 &
  for _ in $(seq 60); do docker info >/dev/null 2>&1 && return; sleep 1; done
  tail -n 20 /tmp/dockerd.log
  exit 1
}

compose() { if docker compose version >/dev/null 2>&1; then docker compose "$@"; else docker-compose "$@"; fi; }

make_base() {
  docker image inspect "$base" >/dev/null 2>&1 && return
  docker pull -q "$base" 2>/dev/null && return
  say "no image registry: making $base with debootstrap"
  local tree sources suite mirror
  tree=$(mktemp -d)
  suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
  mirror=$(apt-cache policy base-files | grep -oE 'https?://[^ ]+' | grep -v security | head -n 1)
  debootstrap --variant=minbase --include=ca-certificates "$suite" "$tree" "$mirror" >/dev/null
  cp -L "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$tree/etc/ssl/certs/ca-certificates.crt"
  mkdir -p "$tree/usr/share/wheels"
  # the CPU build of torch, where this machine's pip finds it; the images' pip looks into /usr/share/wheels first
  python3 -m pip download --quiet --no-deps --dest "$tree/usr/share/wheels" "torch==2.13.0+cpu" || true
  tar -C "$tree" -c . | docker import --change 'ENV PIP_FIND_LINKS=/usr/share/wheels' \
    --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' \
    --change 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' - "$base" >/dev/null
  rm -rf "$tree"
}

build() {
  for target in scheduler tokenizer worker api; do
    say "building pagebus-$target"
    docker build --quiet --network host --target "$target" --tag "pagebus-$target" . >/dev/null
  done
  for target in api scheduler; do
    if docker run --rm --entrypoint python "pagebus-$target" -c 'import torch' 2>/dev/null; then
      say "pagebus-$target must not contain torch"
      exit 1
    fi
  done
}

ask() {
  curl -sS --fail-with-body --max-time 120 http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"messages":[{"role":"user","content":"Say hi."}],"max_tokens":16,"temperature":0}'
}

wait_healthy() {
  for _ in $(seq 180); do
    curl -fs http://127.0.0.1:8000/health >/dev/null 2>&1 && return
    sleep 1
  done
  compose logs --tail 50
  exit 1
}

finish() {
  status=$?
  [ $status -eq 0 ] || compose logs --tail 40 || true
  compose down --volumes --timeout 10 >/dev/null 2>&1 || true
  return $status
}

install_docker
start_docker
make_base
build
trap finish EXIT
say "docker compose up --scale tokenizer=3 --scale worker=2"
compose up --detach --no-build --scale tokenizer=3 --scale worker=2
wait_healthy
ask | grep -q '"chat.completion"'
say "answered; now kill -9 in a worker and a tokenizer container, and ask again"
for service in worker tokenizer; do
  kill -9 "$(docker inspect --format '{{.State.Pid}}' "$(compose ps -q $service | head -n 1)")"
done
ask | grep -q '"chat.completion"'
for service in scheduler tokenizer worker api; do
  for container in $(compose ps -q $service); do
    for _ in $(seq 60); do
      health=$(docker inspect --format '{{.State.Health.Status}}' "$container")
      [ "$health" = healthy ] && break
      sleep 1
    done
    say "$service ${container:0:12}: $health"
    [ "$health" = healthy ]
  done
done
say "compose works"
