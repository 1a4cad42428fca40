#!/usr/bin/env bash
# Fetches Debian for the guest into the directory where this script stands: root.tar, vmlinuz and modules/.
set -euo pipefail
cd "$(dirname "$0")"
packages=mount,systemd-sysv,dbus,kmod,iproute2,containerd,runc,containernetworking-plugins,dropbear-bin
mmdebstrap --quiet --mode=root --variant=essential --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/i18n/*' \
    bookworm root.tar http://deb.debian.org/debian

# The kernel: Debian's for clouds, and those of its modules that a node may want.
mkdir kernel
download_kernel() {
    local package
    package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
    (cd kernel && apt-get -qq -o APT::Sandbox::User=root download "$package")
}
download_kernel || { apt-get -qq update && download_kernel; } # old package lists name packages that are gone
dpkg -x kernel/*.deb kernel
cp kernel/boot/vmlinuz-* vmlinuz
(
    cd kernel/lib/modules/*/kernel
    rm -rf drivers/{gpu,infiniband,scsi,target,nvme,hid,usb,media,mmc,md,ata,video} sound fs/{xfs,btrfs,ocfs2,nfs,nfsd,smb,ceph,gfs2,f2fs,reiserfs,jfs,udf}
)
mv kernel/lib/modules .
rm -rf kernel
