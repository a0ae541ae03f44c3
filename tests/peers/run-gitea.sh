#!/usr/bin/env bash
# One throwaway Gitea for a test: sqlite, loopback only, Actions on, an administrator with an access token.
#
#   run-gitea.sh PORT DIR       start in an empty or absent DIR; prints one JSON line when it is healthy:
#                               {"url","port","dir","pid","admin","password","token","registration_token","log"}
#   run-gitea.sh --again DIR    start the same server again (after --stop, or after it was killed)
#   run-gitea.sh --stop DIR     stop it by its recorded process id
#
# PEERS_DIR          where install-gitea.sh put bin/ and share/
# GITEA_EXTRA_INI    a file appended to app.ini; the last value of a key wins
# GITEA_ROOT_URL     the ROOT_URL to announce, if not the address it listens on
set -euo pipefail

usage() { sed -n '4,7p' "$0" >&2; exit 2; }

# The recorded id may be another process's by now: its command line must name our configuration.
is_ours() { tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -qF "$2/custom/conf/app.ini"; }

stop() {
  local dir=$1 pid
  pid=$(cat "$dir/gitea.pid" 2>/dev/null) || return 0
  is_ours "$pid" "$dir" || return 0
  kill "$pid" 2>/dev/null || true
  kill -CONT "$pid" 2>/dev/null || true
  for _ in $(seq 100); do is_ours "$pid" "$dir" || return 0; sleep 0.1; done
  kill -9 "$pid" 2>/dev/null || true
}

# DIR PORT. Starts the server of an existing configuration and waits at most 30 s until it answers.
serve() {
  local dir=$1 port=$2 pid
  setsid "$gitea" --config "$dir/custom/conf/app.ini" web </dev/null >>"$dir/gitea.log" 2>&1 &
  pid=$!
  echo "$pid" >"$dir/gitea.pid"
  for _ in $(seq 300); do
    if curl -fsS -o /dev/null "http://127.0.0.1:$port/api/healthz" 2>/dev/null; then return 0; fi
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  echo "Gitea did not come up on port $port:" >&2
  tail -20 "$dir/gitea.log" >&2
  stop "$dir"
  return 1
}

# Gitea and the git it starts must not see the caller's settings.
isolate() {
  export HOME=$1/home GITEA_WORK_DIR=$1 GIT_CONFIG_NOSYSTEM=1
  unset GITEA_CUSTOM XDG_CONFIG_HOME
}

# DIR PORT ROOT_URL
write_configuration() {
  cat >"$1/custom/conf/app.ini" <<INI
APP_NAME = throwaway
RUN_MODE = prod
RUN_USER = $(id -un)
WORK_PATH = $1
I_AM_BEING_UNSAFE_RUNNING_AS_ROOT = true

[server]
PROTOCOL = http
HTTP_ADDR = 127.0.0.1
HTTP_PORT = $2
ROOT_URL = $3
STATIC_ROOT_PATH = $peers/share/gitea
DISABLE_SSH = true
OFFLINE_MODE = true
LFS_START_SERVER = false

[database]
DB_TYPE = sqlite3
PATH = $1/gitea.db
SQLITE_JOURNAL_MODE = WAL

[security]
INSTALL_LOCK = true
SECRET_KEY = $("$gitea" generate secret SECRET_KEY)
INTERNAL_TOKEN = $("$gitea" generate secret INTERNAL_TOKEN)

[oauth2]
ENABLED = false
JWT_SECRET = $("$gitea" generate secret JWT_SECRET)

[log]
MODE = console
LEVEL = Info

[service]
DISABLE_REGISTRATION = true

[repository]
DEFAULT_BRANCH = main
DISABLE_STARS = true

[indexer]
ISSUE_INDEXER_TYPE = db

[queue]
TYPE = channel

[cron.update_checker]
ENABLED = false

[actions]
ENABLED = true
DEFAULT_ACTIONS_URL = self
INI
  if [ -n "${GITEA_EXTRA_INI:-}" ]; then { echo; cat "$GITEA_EXTRA_INI"; } >>"$1/custom/conf/app.ini"; fi
}

# DIR. Prints the access token of a new administrator `boss`, whose password is $password.
create_administrator() {
  local ini=$1/custom/conf/app.ini created
  "$gitea" --config "$ini" migrate >"$1/migrate.log" 2>&1 || { tail -20 "$1/migrate.log" >&2; exit 1; }
  created=$("$gitea" --config "$ini" admin user create --admin --username boss --password "$password" \
    --email boss@example.invalid --must-change-password=false \
    --access-token --access-token-name ci --access-token-scopes all 2>"$1/admin.log") \
    || { tail -20 "$1/admin.log" >&2; exit 1; }
  printf '%s\n' "$created" | grep -oE '[0-9a-f]{40}' | tail -1
}

case ${1:-} in
  --stop)
    [ -n "${2:-}" ] || usage
    stop "$(cd "$2" && pwd)"
    exit 0
    ;;
esac

peers=$(cd "${PEERS_DIR:?set PEERS_DIR to where install-gitea.sh put its files}" && pwd)
gitea=$peers/bin/gitea
[ -x "$gitea" ] || { echo "there is no $gitea: run tests/run.sh gitea, which builds it" >&2; exit 1; }

if [ "${1:-}" = --again ]; then
  [ -n "${2:-}" ] || usage
  dir=$(cd "$2" && pwd)
  isolate "$dir"
  serve "$dir" "$(sed -n 's/^HTTP_PORT = //p' "$dir/custom/conf/app.ini" | tail -1)"
  exit 0
fi

port=${1:-}
[ -n "$port" ] && [ -n "${2:-}" ] || usage
mkdir -p "$2"
dir=$(cd "$2" && pwd)
[ -z "$(ls -A "$dir")" ] || { echo "$dir is not empty" >&2; exit 1; }
if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then echo "port $port is in use" >&2; exit 1; fi
mkdir -p "$dir/custom/conf" "$dir/home"
isolate "$dir"
password=$(head -c 18 /dev/urandom | od -An -tx1 | tr -d ' \n')
write_configuration "$dir" "$port" "${GITEA_ROOT_URL:-http://127.0.0.1:$port/}"
token=$(create_administrator "$dir")
[ -n "$token" ] || { echo "Gitea printed no access token" >&2; exit 1; }
serve "$dir" "$port"
registration=$(curl -fsS -X POST -H "Authorization: token $token" \
  "http://127.0.0.1:$port/api/v1/admin/actions/runners/registration-token" | sed -E 's/.*"token": *"([^"]+)".*/\1/')
printf '{"url":"http://127.0.0.1:%s","port":%s,"dir":"%s","pid":%s,"admin":"boss","password":"%s","token":"%s","registration_token":"%s","log":"%s"}\n' \
  "$port" "$port" "$dir" "$(cat "$dir/gitea.pid")" "$password" "$token" "$registration" "$dir/gitea.log"
