#!/usr/bin/env bash
# Makes the Debian package: packaging/build-deb.sh [--binary FILE] [--version VERSION] [--output FOLDER]
#
# Without --binary it builds the release. Man page and completions come from the binary itself. Needs dpkg-deb and binutils.
# Prints the package's path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'packaging/build-deb.sh: %s\n' "$*" >&2; exit 1; }

binary='' output=${CARGO_TARGET_DIR:-target}/debian
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || die "$1 needs a value"
  case $1 in
    --binary) binary=$2 ;;
    --version) version=$2 ;;
    --output) output=$2 ;;
    *) die "unknown option $1" ;;
  esac
  shift 2
done
if [ -z "$binary" ]; then
  cargo build --locked --release >&2
  binary=${CARGO_TARGET_DIR:-target}/release/gitea-dynamic-runner
fi
architecture=$(dpkg --print-architecture)
mkdir -p "$output"
stage=$(mktemp -d "$output/stage.XXXXXX")
trap 'rm -rf "$stage"' EXIT
chmod 755 "$stage"

# MODE SOURCE TARGET
put() { install -D -m "$1" "$2" "$stage$3"; }
# COMMAND… TARGET  What the binary says, compressed if the name says so.
say_into() {
  local target=$stage${*: -1}
  mkdir -p "$(dirname "$target")"
  if [[ $target == *.gz ]]; then "$binary" "${@:1:$#-1}" | gzip -9n >"$target"; else "$binary" "${@:1:$#-1}" >"$target"; fi
  chmod 644 "$target"
}

doc=/usr/share/doc/gitea-dynamic-runner
put 755 "$binary" /usr/bin/gitea-dynamic-runner
strip --strip-unneeded "$stage/usr/bin/gitea-dynamic-runner"
put 644 packaging/gitea-dynamic-runner.service /lib/systemd/system/gitea-dynamic-runner.service
put 644 packaging/env.example /etc/gitea-dynamic-runner/env
put 644 packaging/deb/copyright "$doc/copyright"
put 644 LICENSE-MIT "$doc/LICENSE-MIT"
put 644 README.md "$doc/README.md"
printf 'gitea-dynamic-runner (%s) stable; urgency=medium\n\n  * See CHANGELOG.md of the project.\n\n -- The gitea-dynamic-runner maintainers <maintainers@example.invalid>  %s\n' \
  "$version" "$(date -R -d "@${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}")" | gzip -9n >"$stage$doc/changelog.gz"
chmod 644 "$stage$doc/changelog.gz"
say_into man /usr/share/man/man1/gitea-dynamic-runner.1.gz
say_into completions bash /usr/share/bash-completion/completions/gitea-dynamic-runner
say_into completions zsh /usr/share/zsh/vendor-completions/_gitea-dynamic-runner
say_into completions fish /usr/share/fish/vendor_completions.d/gitea-dynamic-runner.fish

# A static binary needs no C library, another one that which it was built with.
glibc=$(objdump -T "$binary" 2>/dev/null | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -1 || true)
depends=''
[ -z "$glibc" ] || depends="libc6 (>= $glibc), libgcc-s1"
mkdir "$stage/DEBIAN"
sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$architecture/" -e "s/@SIZE@/$(du -sk "$stage" | cut -f1)/" \
  -e "s/@DEPENDS@/$depends/" -e '/^Depends: $/d' packaging/deb/control.in >"$stage/DEBIAN/control"
install -m 644 packaging/deb/conffiles "$stage/DEBIAN/conffiles"
install -m 755 packaging/deb/postinst packaging/deb/prerm packaging/deb/postrm "$stage/DEBIAN/"
(cd "$stage" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
package=$output/gitea-dynamic-runner_${version}_$architecture.deb
dpkg-deb --root-owner-group --build -Zgzip -z"${DEB_COMPRESSION:-6}" "$stage" "$package" >&2
echo "$package"
