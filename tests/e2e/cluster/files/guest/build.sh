#!/usr/bin/env bash
# Builds the guest of node v2 in the directory where this script stands: initrd.gz and root.ext4.
# usage: build.sh DEBIAN KUBELET IMAGE...   (beside it: overlay/ with the files that are ours, init, import.toml)
set -euo pipefail
cd "$(dirname "$0")"
debian=$1 kubelet=$2; shift 2
images=("$@")

mkdir root
tar -xf "$debian/root.tar" -C root --numeric-owner
version=$(ls "$debian/modules")
mkdir -p root/lib/modules
cp -r "$debian/modules/$version" root/lib/modules/
depmod -b root "$version"

# The first steps of the boot: the disks' driver, then the root file system.
mkdir -p initrd/{bin,dev,proc,sys,root,modules}
cp /bin/busybox initrd/bin/
cp init initrd/init
chmod 755 initrd/init
for module in virtio_pci virtio_blk; do
    modprobe --dirname root --set-version "$version" --show-depends "$module"
done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | while read -r path; do
    grep -qxF "$(basename "$path")" initrd/order 2>/dev/null && continue
    cp "$path" initrd/modules/
    basename "$path" >>initrd/order
done
(cd initrd && find . | cpio --quiet --create --format=newc) | gzip -1 >initrd.gz

# What is ours in the root file system. /etc/node is the second disk.
install -m 755 "$kubelet" root/usr/local/bin/kubelet
cp -r overlay/. root/
ln -sf /lib/systemd/system/multi-user.target root/etc/systemd/system/default.target
for unit in node-network containerd kubelet dropbear; do
    ln -sf "../$unit.service" "root/etc/systemd/system/multi-user.target.wants/$unit.service"
done
cp root/lib/systemd/system/containerd.service root/etc/systemd/system/
for unit in getty.target getty-static.service systemd-logind.service systemd-user-sessions.service console-getty.service \
    systemd-pcrphase.service systemd-pcrphase-sysinit.service systemd-update-utmp.service systemd-update-utmp-runlevel.service \
    systemd-machine-id-commit.service systemd-random-seed.service systemd-boot-system-token.service systemd-firstboot.service \
    systemd-ask-password-wall.path systemd-ask-password-console.path systemd-remount-fs.service systemd-journal-flush.service \
    systemd-binfmt.service systemd-sysusers.service systemd-tmpfiles-clean.timer apt-daily.timer apt-daily-upgrade.timer \
    dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer \
    dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount \
    sys-fs-fuse-connections.mount proc-sys-fs-binfmt_misc.automount \
    modprobe@configfs.service modprobe@drm.service modprobe@efi_pstore.service modprobe@fuse.service; do
    ln -sf /dev/null "root/etc/systemd/system/$unit"
done
echo v2 >root/etc/hostname
printf '127.0.0.1 localhost\n' >root/etc/hosts
echo 0123456789abcdef0123456789abcdef >root/etc/machine-id
mkdir -p root/etc/node root/etc/dropbear
install -d -m 700 root/root/.ssh
ln -sf /etc/node/authorized_keys root/root/.ssh/authorized_keys
mkdir -p root/etc/containerd
ln -sf /etc/node/containerd.toml root/etc/containerd/config.toml
dropbearkey -t ed25519 -f root/etc/dropbear/key >/dev/null 2>&1
rm -rf root/var/cache/apt/* root/var/lib/apt/lists/* root/boot/*

# The pod images: imported now, since it takes the guest seconds.
unshare --mount bash -euo pipefail -s -- "${images[@]}" <<'IMPORT'
mount -t tmpfs none /run
containerd --config import.toml >import.log 2>&1 &
trap 'kill %1; wait' EXIT
for image; do
    for ((try = 0; try < 100; try++)); do
        ctr --namespace k8s.io images import "$image" >>import.log 2>&1 && continue 2
        sleep 0.1
    done
    tail import.log >&2
    exit 1
done
IMPORT

rm -f root.ext4
mke2fs -q -t ext4 -O ^has_journal -m 0 -d root root.ext4 1500M
rm -rf root initrd
