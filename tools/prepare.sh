#!/bin/bash
# Installs what the Makefile needs and a fresh Debian 12 lacks. Says nothing and takes no time when all is there.
set -euo pipefail

UV_VERSION=0.13.8
cache=${SPECCACHE_CACHE:-$HOME/.cache/speccache}

packages=(
  python3 python3-venv ca-certificates                       # to install everything else
  containerd runc containernetworking-plugins mount          # the node
  iproute2 nftables openssl                                  # its network and credentials
  buildah skopeo mmdebstrap                                  # the images
)

missing=()
for package in "${packages[@]}"; do
  [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
if (( ${#missing[@]} && (EUID != 0) )); then
  echo "only root can install these; a cluster and the images need them: apt-get install ${missing[*]}" >&2
elif (( ${#missing[@]} )); then
  echo "installing Debian packages: ${missing[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  apt-get update --quiet --quiet
  apt-get install --yes --quiet --quiet --no-install-recommends "${missing[@]}" >/dev/null
fi

if ! command -v uv >/dev/null; then
  echo "installing uv $UV_VERSION into $cache/uv" >&2
  /usr/bin/python3 -m venv "$cache/uv"
  "$cache/uv/bin/pip" install --quiet --disable-pip-version-check "uv==$UV_VERSION"
fi

# go1.25 and later build the cluster's programs.
version=$(go env GOVERSION 2>/dev/null | sed -E 's/^go1\.([0-9]+).*/\1/') || true
if ! [[ $version =~ ^[0-9]+$ ]] || (( version < 25 )); then
  echo "Go 1.25 or later must be on PATH (found: $(go version 2>/dev/null || echo none))" >&2
  exit 1
fi
