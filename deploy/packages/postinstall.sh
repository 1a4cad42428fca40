#!/bin/sh
# After an upgrade the new version adopts what the old one has in force. Nothing starts by itself.
set -e
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl try-restart plimsoll.service
fi
