# shellcheck shell=bash
# Sourced by the start_*.sh beside it: one program as a service of this user, with a pid file and a log.
# The caller sets NAME (the program), LOG_FILE, PID_FILE and COMMAND, and has two functions:
#   ready    true once the program serves
#   retries  true when a program that ended while it came up is worth another try

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
START_TIMEOUT_S=${MOONCAKE_START_TIMEOUT_SECONDS:-60}
STOP_TIMEOUT_S=${MOONCAKE_STOP_TIMEOUT_SECONDS:-30}
# shellcheck disable=SC2034 # for the callers
LOG_DIR=${MOONCAKE_LOG_DIR:-${XDG_STATE_HOME:-$HOME/.local/state}/xllm-mooncake}

say() { printf '%s: %s\n' "$NAME" "$*" >&2; }

# Names every variable that is missing, not only the first.
require() {
  local missing=() variable
  for variable in "$@"; do
    [ -n "${!variable:-}" ] || missing+=("$variable")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    say "set ${missing[*]}"
    exit 2
  fi
}

# host:port;host:port, whatever mixture of commas, blanks and etcd:// it was given as.
etcd_endpoints() {
  local text=${MOONCAKE_ETCD_ENDPOINTS#etcd://}
  text=${text//http:\/\//}
  text=${text//,/;}
  printf '%s' "${text// /}"
}

# The program itself. What a wheel puts beside python is a script around it, which a signal would end alone.
find_program() {
  local found folder candidate
  if [ -n "${MOONCAKE_BIN_DIR:-}" ]; then
    found=$MOONCAKE_BIN_DIR/$NAME
  else
    found=$(command -v "$NAME" || true)
    [ -n "$found" ] || found=$ROOT/.venv/bin/$NAME
  fi
  if [ -f "$found" ] && [ "$(head -c 2 "$found" | tr -d '\0')" = '#!' ]; then
    folder=$(dirname "$(dirname "$(readlink -f "$found")")")
    for candidate in "$folder"/lib/python3*/site-packages/mooncake/"$NAME"; do
      [ -x "$candidate" ] && found=$candidate
    done
  fi
  if [ ! -x "$found" ]; then
    say "not found: put it in PATH, in $ROOT/.venv, or name its folder in MOONCAKE_BIN_DIR"
    exit 2
  fi
  printf '%s' "$found"
}

# Ticks since boot when process $1 began: with the pid it names a process for good.
began() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20; }

alive() { [ -n "$(began "$1")" ] && [ "$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -c 1)" != Z ]; }

# Prints the pid of our running program; 1 = none is running, and a pid file that says otherwise is removed.
running_pid() {
  local pid='' start='' other
  [ -f "$PID_FILE" ] || return 1
  { read -r pid && read -r start; } <"$PID_FILE" || true
  if [[ $pid =~ ^[0-9]+$ ]] && alive "$pid"; then
    if [ "$(began "$pid")" = "$start" ]; then
      printf '%s' "$pid"
      return 0
    fi
    other=$(tr '\0\n' '  ' <"/proc/$pid/cmdline" 2>/dev/null || true)
    say "stale $PID_FILE: $pid is now another program: ${other:-?}"
  else
    say "stale $PID_FILE: nothing runs as ${pid:-?}"
  fi
  rm -f "$PID_FILE"
  return 1
}

# True when something accepts connections at host $1, port $2.
accepts() { timeout 2 bash -c "exec 3<>/dev/tcp/$1/$2" 2>/dev/null; }

# The answer of http://$1:$2$3, with its header; empty when there is none.
http_get() {
  # shellcheck disable=SC2016 # expanded by the inner shell
  timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1" && printf "GET %s HTTP/1.0\r\nHost: %s\r\n\r\n" "$2" "$0" >&3 && cat <&3' \
    "$1" "$2" "$3" 2>/dev/null || true
}

launch() {
  setsid "${COMMAND[@]}" >>"$LOG_FILE" 2>&1 </dev/null &
  local pid=$!
  printf '%s\n%s\n' "$pid" "$(began "$pid")" >"$PID_FILE"
}

do_start() {
  local pid
  if pid=$(running_pid); then
    say "already running as $pid"
    return 0
  fi
  mkdir -p "$(dirname "$LOG_FILE")" "$(dirname "$PID_FILE")"
  launch
  local end=$((SECONDS + START_TIMEOUT_S))
  while [ "$SECONDS" -lt "$end" ]; do
    pid=$(head -n 1 "$PID_FILE")
    if ! alive "$pid"; then
      retries || break
      sleep 1
      launch
    elif ready; then
      say "running as $pid, log $LOG_FILE"
      return 0
    fi
    sleep 0.2
  done
  say "did not come up within $START_TIMEOUT_S s; the end of $LOG_FILE:"
  tail -n 20 "$LOG_FILE" >&2
  do_stop
  return 1
}

do_stop() {
  local pid end
  if ! pid=$(running_pid); then
    say 'not running'
    return 0
  fi
  kill -TERM "$pid" 2>/dev/null || true
  end=$((SECONDS + STOP_TIMEOUT_S))
  while alive "$pid" && [ "$SECONDS" -lt "$end" ]; do sleep 0.1; done
  if alive "$pid"; then
    say "did not end within $STOP_TIMEOUT_S s and is killed"
    kill -KILL "$pid" 2>/dev/null || true
    while alive "$pid"; do sleep 0.1; done
  fi
  rm -f "$PID_FILE"
  say 'stopped'
}

do_status() {
  local pid
  if ! pid=$(running_pid); then
    say 'not running'
    return 3
  fi
  if ready; then
    say "running as $pid"
  else
    say "running as $pid, does not serve yet"
  fi
}

# $1 = start | run | stop | status
serve() {
  case "$1" in
    start) do_start ;;
    run) exec "${COMMAND[@]}" ;;
    stop) do_stop ;;
    status) do_status ;;
    *)
      say "usage: $(basename "$0") [start|run|stop|status] [more flags of $NAME]"
      exit 2
      ;;
  esac
}
