#!/usr/bin/env bash
# Builds a real Gitea server and the official runner from their published Go modules, once per version.
#
#   install-gitea.sh server|runner|all
#
# PEERS_DIR receives bin/gitea, bin/gitea-runner and share/gitea (what the server reads at run time). A stamp beside each binary
# names its version, so a second call returns at once. GITEA_VERSION and GITEA_RUNNER_VERSION choose other versions; two
# versions of the server need two PEERS_DIRs.
set -euo pipefail
what=${1:-all}
server_version=${GITEA_VERSION:-1.27.3}
runner_version=${GITEA_RUNNER_VERSION:-1.0.8}
: "${PEERS_DIR:?set PEERS_DIR to the folder that receives the binaries}"
mkdir -p "$PEERS_DIR"/{bin,share,src}
PEERS_DIR=$(cd "$PEERS_DIR" && pwd)
bin=$PEERS_DIR/bin
unset GOFLAGS
export GOWORK=off CGO_ENABLED=0

built() { [ -x "$bin/$1" ] && [ "$(cat "$bin/.$1.version" 2>/dev/null)" = "$2" ]; }

# MODULE VERSION FOLDER. `go install` refuses both modules by path (a module name that is not the path; `replace` lines), and
# the module cache cannot be written: the build happens in a copy.
copy_module() {
  local dir
  dir=$(cd / && go mod download -json "$1@v$2" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
  [ -n "$dir" ] || { echo "cannot get $1@v$2: is the Go module proxy reachable (go env GOPROXY)?" >&2; exit 1; }
  if [ -d "$3" ]; then chmod -R u+w "$3"; rm -rf "$3"; fi
  cp -r "$dir" "$3"
  chmod -R u+w "$3"
}

# LOG PACKAGE-ARGUMENTS… A failed build shows its log without the download chatter.
build() {
  local log=$1; shift
  nice -n 10 go build -trimpath "$@" . 2>"$log" || { grep -v '^go: downloading' "$log" >&2; exit 1; }
}

if [ "$what" != runner ] && ! built gitea "$server_version"; then
  echo "building Gitea $server_version (6 to 8 minutes the first time)" >&2
  began=$SECONDS
  src=$PEERS_DIR/src/gitea
  copy_module code.gitea.io/gitea "$server_version" "$src"
  cd "$src"
  # The protocol module is published under its former name only.
  go mod edit -replace gitea.dev/actions-proto-go=code.gitea.io/actions-proto-go@v0.6.0
  # The SDK is not published under the name it is asked by. One file needs it, the import from another Gitea, which no test uses.
  rm -f services/migrations/gitea_downloader.go services/migrations/gitea_downloader_test.go
  go mod edit -droprequire gitea.dev/sdk
  tags=
  # Servers before 1.27 have the sqlite driver in C.
  case $server_version in 1.26.*) tags=sqlite,sqlite_unlock_notify; export CGO_ENABLED=1 ;; esac
  build "$PEERS_DIR/src/gitea-build.log" -mod=mod -tags "$tags" -ldflags "-s -w -X main.Version=$server_version" -o "$bin/gitea"
  # The module has no built frontend, so nothing is embedded: the server reads these folders instead (STATIC_ROOT_PATH).
  rm -rf "$PEERS_DIR/share/gitea"
  mkdir -p "$PEERS_DIR/share/gitea"
  cp -r templates options public "$PEERS_DIR/share/gitea/"
  cd "$PEERS_DIR"
  rm -rf "$src"
  echo "$server_version" >"$bin/.gitea.version"
  echo "built Gitea $server_version in $((SECONDS - began)) s" >&2
  export CGO_ENABLED=0
fi

if [ "$what" != server ] && ! built gitea-runner "$runner_version"; then
  echo "building the official runner $runner_version (about a minute)" >&2
  began=$SECONDS
  src=$PEERS_DIR/src/gitea-runner
  copy_module gitea.com/gitea/runner "$runner_version" "$src"
  cd "$src"
  build "$PEERS_DIR/src/gitea-runner-build.log" \
    -ldflags "-s -w -X gitea.com/gitea/runner/internal/pkg/ver.version=v$runner_version" -o "$bin/gitea-runner"
  cd "$PEERS_DIR"
  rm -rf "$src"
  echo "$runner_version" >"$bin/.gitea-runner.version"
  echo "built the official runner $runner_version in $((SECONDS - began)) s" >&2
fi
