#!/usr/bin/env bash
# What the controller costs, against the official runner alone on the same throwaway Gitea. Prints a table; results go to docs/performance.md.
#
#   tests/bench.sh [PROGRAM]    default: target/release/gitea-dynamic-runner, which must be built
#   tests/bench.sh load         10,000 jobs (LOAD_JOBS) that only claim and finish, through JetStream and through the embedded queue
#
# Measured, in turn, from the push (the commit call's return) to the last job done, as Gitea's API shows it:
#   one trivial job (median of RUNS, default 5), and a matrix of 40 trivial jobs at capacity 4;
# then the program's size, and the controller's resident size idle and with 50 jobs running.
# Needs what `tests/run.sh gitea` installs into PEERS_DIR. Speaks to loopback only; what it starts it ends, by process id. At most 15 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = load ]; then
  scratch=$(mktemp -d /tmp/gdrl.XXXX)
  chmod 711 "$scratch"
  status=0
  TMPDIR=$scratch cargo test --locked --release --test load -- --ignored --nocapture --test-threads 1 || status=$?
  rm -rf "$scratch"
  exit "$status"
fi
program=${1:-target/release/gitea-dynamic-runner}
runs=${RUNS:-5}
matrix=${MATRIX:-40}
crowd=${CROWD:-50}
capacity=4
export PEERS_DIR=${PEERS_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/gitea-dynamic-runner/peers}

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'tests/bench.sh: %s\n' "$*" >&2; exit 1; }

[ -x "$program" ] || die "there is no $program: cargo build --release"
[ -x "$PEERS_DIR/bin/gitea" ] && [ -x "$PEERS_DIR/bin/gitea-runner" ] || die "Gitea and the runner are not in $PEERS_DIR: tests/run.sh gitea installs them"
command -v curl >/dev/null || die "curl is missing: install it"
command -v python3 >/dev/null || die "python3 is missing: install it"

# Jobs have users of their own, who must be able to pass through and to run both programs.
scratch=$(mktemp -d /tmp/gdrb.XXXX)
chmod 711 "$scratch"
install -m 755 "$program" "$scratch/controller"
install -m 755 "$PEERS_DIR/bin/gitea-runner" "$scratch/gitea-runner"
started=""

# PID. Asks it to end, and after 15 s makes it.
end() {
  kill "$1" 2>/dev/null || return 0
  for _ in $(seq 150); do kill -0 "$1" 2>/dev/null || return 0; sleep 0.1; done
  kill -9 "$1" 2>/dev/null || true
}

clean_up() {
  local status=$? link pid
  [ -z "$started" ] || end "$started"
  [ ! -e "$scratch/gitea/gitea.pid" ] || bash tests/peers/run-gitea.sh --stop "$scratch/gitea"
  # Environments outlive their controller, by design: whoever still runs our copy of a program is one.
  for link in /proc/[0-9]*/exe; do
    case $(readlink "$link" 2>/dev/null) in
      "$scratch"/*) pid=${link#/proc/}; kill -9 "${pid%/exe}" 2>/dev/null || true ;;
    esac
  done
  [ "$status" = 0 ] || tail -n 20 "$scratch"/*.log >&2 2>/dev/null || true
  rm -rf "$scratch"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
now() { date +%s%N; }
# FROM TO. Seconds, with three digits.
seconds() { awk -v from="$1" -v to="$2" 'BEGIN { printf "%.3f", (to - from) / 1e9 }'; }
# METHOD PATH [BODY]
api() {
  curl -fsS --noproxy '*' --max-time 20 -X "$1" -H "Authorization: token $token" -H 'Content-Type: application/json' ${3:+--data "$3"} "$gitea/api/v1$2"
}

# NAME RUNS-ON JOBS STEP. Pushes a workflow into a repository of its own; prints when the push was answered.
push() {
  local strategy="" content
  if [ "$3" -gt 1 ]; then strategy="    strategy: {matrix: {n: [$(seq -s, "$3")]}}"; fi
  content=$(printf 'on: push\njobs:\n  job:\n    runs-on: %s\n%s\n    steps: [{run: "%s"}]\n' "$2" "$strategy" "$4" | base64 -w0)
  api POST /user/repos "{\"name\":\"$1\",\"auto_init\":true,\"default_branch\":\"main\"}" >/dev/null
  api POST "/repos/boss/$1/contents/.gitea/workflows/ci.yaml" "{\"branch\":\"main\",\"message\":\"Add it\",\"content\":\"$content\"}" >/dev/null
  now
}

# NAME SECONDS. Waits until the repository's only run is over; prints when. Fails if it is not green.
over() {
  local answer deadline=$((SECONDS + $2))
  while [ "$SECONDS" -lt "$deadline" ]; do
    answer=$(api GET "/repos/boss/$1/actions/runs")
    # The run's own status; the repository and the user within it have none.
    if [[ $answer =~ \"status\":\ *\"completed\" ]]; then
      [[ $answer =~ \"conclusion\":\ *\"success\" ]] || die "$1 is not green"
      now
      return 0
    fi
    sleep 0.03
  done
  die "$1 has not ended within $2 s"
}

# NAME RUNS-ON JOBS. Seconds from push to the last job done.
timed() {
  local from to
  from=$(push "$1" "$2" "$3" "echo hello")
  to=$(over "$1" 240)
  seconds "$from" "$to"
}

# NAME RUNS-ON. The median of `runs` single jobs.
median_of_one() {
  local n
  for n in $(seq "$runs"); do timed "$1-$n" "$2" 1; echo; done | sort -n | sed -n "$(((runs + 1) / 2))p"
}

# The official runner alone.
start_alone() {
  mkdir -p "$scratch/alone"
  printf 'log: {level: warn}\nrunner: {capacity: %s}\n' "$capacity" >"$scratch/alone/config.yaml"
  (cd "$scratch/alone" && HOME=$scratch/alone "$scratch/gitea-runner" register --no-interactive --name alone --labels alone:host \
    --instance "$gitea" --token "$registration") >"$scratch/register.log" 2>&1
  (cd "$scratch/alone" && HOME=$scratch/alone exec "$scratch/gitea-runner" daemon --config config.yaml) >"$scratch/alone.log" 2>&1 </dev/null &
  started=$!
  sleep 3
}

# CAPACITY. The controller; ready on return.
start_controller() {
  local http
  http=$(free_port)
  settings=(GITEA_URL="$gitea" STATE_DIRECTORY="$scratch/state" POD_CAPACITY="$1" RUNNER_FACADE_LISTEN="127.0.0.1:$(free_port)"
    HTTP_LISTEN="127.0.0.1:$http" RUNNER_BIN="$scratch/gitea-runner" POD_EXECUTOR_UID=240000 PATH="$PATH" HOME="$scratch")
  [ "$(id -u)" = 0 ] || settings+=(LOCAL_UNISOLATED=1)
  if [ ! -e "$scratch/state" ]; then
    mkdir -m 711 "$scratch/state"
    printf '%s' "$registration" | env -i "${settings[@]}" "$scratch/controller" register --name bench >"$scratch/register.log" 2>&1
  fi
  env -i "${settings[@]}" "$scratch/controller" serve --standalone >>"$scratch/controller.log" 2>&1 </dev/null &
  started=$!
  for _ in $(seq 200); do
    if curl -fsS --noproxy '*' -o /dev/null "http://127.0.0.1:$http/readyz" 2>/dev/null; then return 0; fi
    kill -0 "$started" 2>/dev/null || break
    sleep 0.1
  done
  die "the controller did not become ready"
}

stop_started() { end "$started"; wait "$started" 2>/dev/null || true; started=""; }
environments() { find "$scratch/state/private/environments" -name '*.json' 2>/dev/null | wc -l; }
mebibytes() { awk -v n="$1" -v unit="$2" 'BEGIN { printf "%.1f MiB", n * unit / 1048576 }'; }
resident() { awk '/^VmRSS:/ { print $2 }' "/proc/$started/status"; }

say "starting Gitea"
facts=$(bash tests/peers/run-gitea.sh "$(free_port)" "$scratch/gitea")
field() { printf '%s' "$facts" | sed -E "s/.*\"$1\":\"([^\"]*)\".*/\1/"; }
gitea=$(field url) token=$(field token) registration=$(field registration_token)

say "the official runner alone"
start_alone
timed warm-alone alone 1 >/dev/null
alone_one=$(median_of_one alone alone)
alone_matrix=$(timed alone-matrix alone "$matrix")
stop_started

say "the controller, capacity $capacity"
start_controller "$capacity"
timed warm-ours '[self-hosted, pod]' 1 >/dev/null
ours_one=$(median_of_one ours '[self-hosted, pod]')
ours_matrix=$(timed ours-matrix '[self-hosted, pod]' "$matrix")
stop_started

say "the controller, $crowd jobs at once"
start_controller "$crowd"
sleep 10
idle=$(resident)
push crowd '[self-hosted, pod]' "$crowd" "sleep 20" >/dev/null
most=0 crowded=0
for _ in $(seq 180); do
  now_there=$(environments)
  if [ "$now_there" -ge "$most" ]; then most=$now_there; fi
  size=$(resident)
  if [ "$size" -gt "$crowded" ]; then crowded=$size; fi
  if [ "$most" -gt 0 ] && [ "$now_there" = 0 ]; then break; fi
  sleep 0.5
done
over crowd 60 >/dev/null
stop_started

ratio() { awk -v ours="$1" -v alone="$2" 'BEGIN { printf "%.2f", ours / alone }'; }
cat <<TABLE

| | official runner alone | controller | ratio |
|---|---|---|---|
| one trivial job, median of $runs | $alone_one s | $ours_one s | $(ratio "$ours_one" "$alone_one") |
| a matrix of $matrix at capacity $capacity | $alone_matrix s | $ours_matrix s | $(ratio "$ours_matrix" "$alone_matrix") |

| | |
|---|---|
| size of the program | $(mebibytes "$(stat -c %s "$program")" 1) |
| resident size, idle | $(mebibytes "$idle" 1024) |
| resident size, at most, while up to $most environments existed | $(mebibytes "$crowded" 1024) |

$(date -u +%F), $(nproc) cores, $(uname -sr), Gitea $("$PEERS_DIR/bin/gitea" --version | awk '{ print $3 }'), $("$PEERS_DIR/bin/gitea-runner" --version | awk '{ print $NF }')
TABLE
