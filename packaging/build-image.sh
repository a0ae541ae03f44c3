#!/usr/bin/env bash
# Builds the container image: packaging/build-image.sh --tag NAME [--binary STATIC-FILE] [-- OPTION-OF-BUILDAH…]
#
# No registry is asked: it begins at nothing. Without --binary the static release is built (rustup target, musl-gcc). The authorities
# that it trusts are this machine's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'packaging/build-image.sh: %s\n' "$*" >&2; exit 1; }

target=$(uname -m)-unknown-linux-musl
binary='' tag=''
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  [ $# -ge 2 ] || die "$1 needs a value"
  case $1 in
    --binary) binary=$2 ;;
    --tag) tag=$2 ;;
    *) die "unknown option $1" ;;
  esac
  shift 2
done
[ "${1:-}" != -- ] || shift
[ -n "$tag" ] || die "--tag NAME is needed"
if [ -z "$binary" ]; then
  cargo build --locked --release --target "$target" >&2
  binary=${CARGO_TARGET_DIR:-target}/$target/release/gitea-dynamic-runner
fi
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
install -m 755 "$binary" "$context/gitea-dynamic-runner"
strip --strip-unneeded "$context/gitea-dynamic-runner"
install -m 644 /etc/ssl/certs/ca-certificates.crt "$context/ca-certificates.crt"
buildah "$@" build --isolation chroot --format oci --file packaging/Containerfile --tag "$tag" "$context" >&2
echo "$tag"
