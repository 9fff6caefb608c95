#!/usr/bin/env bash
# This node's share of a highly available Mooncake Store; one on each node, whose instances use it by shared memory.
#   start_mooncake_client.sh [start|run|stop|status] [more flags of mooncake_client]
# needs     MOONCAKE_ETCD_ENDPOINTS  host:port;host:port
#           MOONCAKE_CLIENT_HOST     address of this machine that other clients reach, with or without a port
# optional  MOONCAKE_CLUSTER_ID xllm-mooncake, MOONCAKE_CLIENT_PORT 50052, MOONCAKE_GLOBAL_SEGMENT_SIZE 4GB,
#           MOONCAKE_PROTOCOL tcp, MOONCAKE_CLIENT_THREADS 4, MOONCAKE_LOG_DIR, MOONCAKE_PID_FILE,
#           MOONCAKE_START_TIMEOUT_SECONDS 60, MOONCAKE_STOP_TIMEOUT_SECONDS 30, MOONCAKE_BIN_DIR
# mooncake_client ends when no leader serves, as in the five seconds of a leader's warm-up: `start` tries again until
# its time is over; under `run` the supervisor must.
set -euo pipefail
NAME=mooncake_client
# shellcheck source=service.sh
. "$(dirname "${BASH_SOURCE[0]}")/service.sh"

action=${1:-start}
[ $# -gt 0 ] && shift
LOG_FILE=$LOG_DIR/$NAME.log
PID_FILE=${MOONCAKE_PID_FILE:-$LOG_DIR/$NAME.pid}
CLIENT_PORT=${MOONCAKE_CLIENT_PORT:-50052}
COMMAND=()
if [ "$action" = start ] || [ "$action" = run ]; then
  require MOONCAKE_ETCD_ENDPOINTS MOONCAKE_CLIENT_HOST
  export MC_STORE_CLUSTER_ID=${MOONCAKE_CLUSTER_ID:-xllm-mooncake}
  export MC_LOG_LEVEL=${MC_LOG_LEVEL:-WARNING}
  unset MC_LOG_DIR # mooncake_client aborts with it
  PROGRAM=$(find_program)
  COMMAND=(
    "$PROGRAM"
    --host="$MOONCAKE_CLIENT_HOST"
    --port="$CLIENT_PORT"
    --global_segment_size="${MOONCAKE_GLOBAL_SEGMENT_SIZE:-4GB}"
    --master_server_address="etcd://$(etcd_endpoints)"
    --metadata_server=P2PHANDSHAKE
    --protocol="${MOONCAKE_PROTOCOL:-tcp}"
    --threads="${MOONCAKE_CLIENT_THREADS:-4}"
    "$@"
  )
fi

# It listens at its host's address only.
ready() {
  local host=${MOONCAKE_CLIENT_HOST:-127.0.0.1}
  accepts "${host%:*}" "$CLIENT_PORT"
}

retries() { true; }

serve "$action"
