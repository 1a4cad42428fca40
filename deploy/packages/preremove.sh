#!/bin/sh
# What it has in force must not outlive it: ends the service and restores everything, unless this is an upgrade.
set -e
case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then systemctl disable --quiet --now plimsoll.service; fi
if [ -e /var/lib/plimsoll/journal ]; then plimsoll run --restore; fi
