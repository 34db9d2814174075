#!/bin/sh
# Unpacks Debian's chromium-headless-shell, with what it needs and this machine lacks, into DIR:
# nothing is installed, so no rights are needed. DIR/chromium starts it.
#
#     get_chromium.sh DIR
set -eu
package=chromium-headless-shell
mkdir -p "$1"
cd "$1"
dir=$(pwd)
missing() { apt-get install --simulate --no-install-recommends $package 2>/dev/null | awk '/^Inst/ {print $2}'; }
names=$(missing) && test -n "$names" || { apt-get update --quiet=2; names=$(missing); }
mkdir -p packages root
(cd packages && apt-get download --quiet=2 $package $names 2>/dev/null)
for file in packages/*.deb; do dpkg --extract "$file" root; done
rm -r packages

cat > fonts.conf <<END
<?xml version="1.0"?>
<fontconfig>
<dir>/usr/share/fonts</dir><dir>$dir/root/usr/share/fonts</dir><cachedir>$dir/fonts</cachedir>
<alias><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
<alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
END
libraries=$(find "$dir/root/usr/lib" -name '*.so*' -printf '%h\n' | sort -u | paste -s -d:)
cat > chromium <<END
#!/bin/sh
export LD_LIBRARY_PATH="$libraries" FONTCONFIG_FILE="\${FONTCONFIG_FILE:-$dir/fonts.conf}"
exec "$dir/root/usr/lib/chromium/chromium-headless-shell" "\$@"
END
chmod 755 chromium
./chromium --version
