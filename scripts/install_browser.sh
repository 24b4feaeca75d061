#!/bin/sh
# Installs Debian's Chromium for the tests that look at pages, if there is no browser yet. Needs root.
set -eu
if command -v chromium >/dev/null 2>&1; then
  exit 0
fi
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium fonts-dejavu-core
