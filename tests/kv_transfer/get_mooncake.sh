#!/bin/sh
# Unpacks Mooncake (46 MB) into DIR, with Debian's libraries that it needs and this machine lacks:
# nothing is installed, so no rights are needed. With DIR in PYTHONPATH `import mooncake` works.
#
#     get_mooncake.sh PYTHON DIR
set -eu
packages="libibverbs1 libcurl4 libnuma1"
"$1" -m pip --disable-pip-version-check --quiet install --no-deps --target "$2" --upgrade \
	"mooncake-transfer-engine-non-cuda>=0.3.13,<0.4"
cd "$2"
missing() { apt-get install --simulate --no-install-recommends $packages 2>/dev/null | awk '/^Inst/ {print $2}'; }
names=$(missing) || { apt-get update --quiet=2; names=$(missing); }
if test -n "$names"; then
	mkdir -p packages root
	(cd packages && apt-get download --quiet=2 $names 2>/dev/null)
	for file in packages/*.deb; do dpkg --extract "$file" root; done
	find root -name '*.so.*' -exec cp --no-dereference {} mooncake_transfer_engine*.libs/ \;
	rm -r packages root
fi
PYTHONPATH=. "$1" -c 'import mooncake.store'
touch .installed
