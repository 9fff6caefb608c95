#!/usr/bin/env bash
# One candidate for the leader of a highly available Mooncake Store; start one on each of two or three machines.
#   start_mooncake_ha_service.sh [start|run|stop|status] [more flags of mooncake_master]
# needs     MOONCAKE_ETCD_ENDPOINTS  host:port;host:port
#           MOONCAKE_RPC_ADDRESS     address of this machine that clients reach
# optional  MOONCAKE_CLUSTER_ID xllm-mooncake, MOONCAKE_RPC_PORT 50051, MOONCAKE_METRICS_PORT 9003, MOONCAKE_LOG_DIR,
#           MOONCAKE_CLIENT_TTL_SECONDS 30, MOONCAKE_PID_FILE, MOONCAKE_START_TIMEOUT_SECONDS 60,
#           MOONCAKE_STOP_TIMEOUT_SECONDS 30, MOONCAKE_BIN_DIR
# `run` stays in the foreground, for a supervisor. `status` ends with 0 when it runs, 3 when not.
set -euo pipefail
NAME=mooncake_master
# shellcheck source=service.sh
. "$(dirname "${BASH_SOURCE[0]}")/service.sh"

action=${1:-start}
[ $# -gt 0 ] && shift
LOG_FILE=$LOG_DIR/$NAME.log
PID_FILE=${MOONCAKE_PID_FILE:-$LOG_DIR/$NAME.pid}
METRICS_PORT=${MOONCAKE_METRICS_PORT:-9003}
COMMAND=()
if [ "$action" = start ] || [ "$action" = run ]; then
  require MOONCAKE_ETCD_ENDPOINTS MOONCAKE_RPC_ADDRESS
  PROGRAM=$(find_program)
  COMMAND=(
    "$PROGRAM"
    --enable_ha=true
    --ha_backend_type=etcd
    --ha_backend_connstring="$(etcd_endpoints)"
    --cluster_id="${MOONCAKE_CLUSTER_ID:-xllm-mooncake}"
    --enable_oplog=true # without it a new leader knows no object of the old one
    # A leader that etcd left lives on for up to 15 s: should it take its clients for dead by then, it writes that into the
    # log the moment etcd is back, and their objects are gone for every later leader (Mooncake's default: 10 s).
    --client_ttl="${MOONCAKE_CLIENT_TTL_SECONDS:-30}"
    --rpc_address="$MOONCAKE_RPC_ADDRESS"
    --rpc_port="${MOONCAKE_RPC_PORT:-50051}"
    --metrics_host="$MOONCAKE_RPC_ADDRESS"
    --metrics_port="$METRICS_PORT"
    "$@"
  )
fi

# It leads and its warm-up is over, or it stands by.
ready() {
  local answer
  answer=$(http_get "${MOONCAKE_RPC_ADDRESS:-127.0.0.1}" "$METRICS_PORT" /health | tr -d ' ')
  [[ $answer == *'"service_ready":true'* || $answer == *'"ha_state":"standby"'* ]]
}

retries() { false; }

serve "$action"
