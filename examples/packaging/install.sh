#!/bin/sh
# Installs journeyman on a host without packages, prints what it did, and starts nothing. Run again, it updates: workers that run
# finish their tasks and restart.
#
#   examples/packaging/install.sh --of BINARY [--prefix DIR]     below /usr/local; systemd finds units there and below /usr only
#   examples/packaging/install.sh --uninstall [--prefix DIR]     waits for running tasks; keeps configuration, state and user
#
# With DESTDIR it only puts files below that folder, and neither adds a user nor calls systemd.
set -eu
umask 022
here=$(cd "$(dirname "$0")" && pwd)
binary='' prefix=/usr/local uninstall=''
while [ $# -gt 0 ]; do
    case $1 in
    --of) binary=${2:-} && shift ;;
    --prefix) prefix=${2:?} && shift ;;
    --uninstall) uninstall=yes ;;
    *) binary='' uninstall='' && break ;;
    esac
    shift
done
if [ -z "$binary$uninstall" ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
to=${DESTDIR:-} config=/etc/journeyman/journeyman.toml state=/var/lib/journeyman
# The scripts of the packages add the user, and stop or restart services.
script() { if [ -z "$to" ]; then JOURNEYMAN_PREFIX=$prefix DPKG_ROOT='' sh "$here/debian/$1" "$2" "${3:-}"; fi; }

if [ -n "$uninstall" ]; then
    script prerm remove
    for path in bin/journeyman share/journeyman/before-253.conf lib/systemd/system/journeyman.service \
        lib/systemd/system/journeyman@.service lib/systemd/system/journeyman-controller.service; do
        if [ -e "$to$prefix/$path" ]; then rm "$to$prefix/$path" && echo "removed $to$prefix/$path"; fi
    done
    rmdir "$to$prefix/share/journeyman" 2>/dev/null || true
    script postrm remove
    exit
fi

before='' changed=''
if [ -e "$to$prefix/bin/journeyman" ]; then before=yes; fi
# place MODE FILE PATH
place() {
    if cmp -s "$2" "$to$3"; then return; fi
    mkdir -p "$to${3%/*}"
    install -m "$1" "$2" "$to$3"
    changed=yes
    echo "installed $to$3"
}
place 755 "$binary" "$prefix/bin/journeyman"
place 644 "$here/../systemd/before-253.conf" "$prefix/share/journeyman/before-253.conf"
unit=$(mktemp)
trap 'rm -f "$unit"' EXIT
for name in journeyman journeyman@ journeyman-controller; do
    sed "s|=/usr/bin/|=$prefix/bin/|" "$here/../systemd/$name.service" >"$unit"
    place 644 "$unit" "$prefix/lib/systemd/system/$name.service"
done
if [ -e "$to$config" ]; then echo "kept $to$config"; else place 644 "$here/debian/journeyman.toml" "$config"; fi
user=$(id -u journeyman 2>/dev/null || true)
# With another argument it restarts running workers.
script postinst configure "${changed:+$before}"
if [ -z "$to$user" ]; then echo "added the user journeyman"; fi
if [ ! -d "$to$state" ]; then
    mkdir -p "$to$state"
    chmod 750 "$to$state"
    if [ -z "$to" ]; then chown journeyman:journeyman "$state"; fi
    echo "made $to$state"
fi
