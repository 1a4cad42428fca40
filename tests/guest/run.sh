#!/usr/bin/env bash
# Runs test binaries on a real cgroup v2 kernel: Debian's cloud kernel in a qemu guest, by software emulation.
#
#   tests/guest/run.sh                the kernel tests (tests/kernel), built here
#   tests/guest/run.sh FILE...        these static test binaries (a file named `plimsoll` is only copied to /bin)
#
# Environment: GUEST_TIMEOUT seconds (default 1800, since emulation is slow on a busy machine), GUEST_ARGS for every test binary (such as a filter).
set -euo pipefail
cd "$(dirname "$0")/../.."
target=x86_64-unknown-linux-musl
cache=$PWD/target/guest
timeout=${GUEST_TIMEOUT:-1800}
mkdir -p "$cache"

main() {
    need qemu-system-x86_64 qemu-system-x86
    need cpio cpio
    need /sbin/mke2fs e2fsprogs
    need "$(busybox)" busybox-static
    local kernel tests=("$@")
    kernel=$(kernel)
    [ ${#tests[@]} -gt 0 ] || mapfile -t tests < <(build)
    local work
    work=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$work'" EXIT
    pack "$work" "${tests[@]}"
    boot "$kernel" "$work/initrd.gz" "$work/console"
}

busybox() { command -v /bin/busybox || command -v busybox || echo /bin/busybox; }

need() { # COMMAND PACKAGE
    command -v "$1" >/dev/null && return
    echo "installing $2"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >/dev/null
}

# Prints the path of the kernel, which is downloaded once.
kernel() {
    local found
    found=$(ls "$cache"/kernel/boot/vmlinuz-* 2>/dev/null | head -1 || true)
    if [ -z "$found" ] || [ ! -e "$cache/kernel/brd.ko" ]; then
        echo "fetching Debian's cloud kernel" >&2
        local fetch
        fetch=$(mktemp -d "$cache/fetch.XXXX")
        (
            cd "$fetch"
            package=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null | awk '/Depends: linux-image/ {print $2; exit}')
            if [ -z "$package" ]; then
                apt-get update -qq
                package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ {print $2; exit}')
            fi
            apt-get download -qq "$package" 2>/dev/null
            dpkg -x ./*.deb unpacked
        ) >&2
        rm -rf "$cache/kernel"
        mkdir -p "$cache/kernel/boot"
        # A RAM disk, so that there is page cache to reclaim.
        find "$fetch/unpacked" -name brd.ko -exec cp {} "$cache/kernel/" ';'
        cp "$fetch"/unpacked/boot/vmlinuz-* "$cache/kernel/boot/"
        rm -rf "$fetch"
        found=$(ls "$cache"/kernel/boot/vmlinuz-* | head -1)
    fi
    echo "$found"
}

# Builds the kernel tests and prints their paths.
build() {
    cargo test -q --no-run --target $target --message-format=json --test kernel |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'
}

# Packs an initramfs with busybox, the binaries and an init that runs them.
pack() { # DIRECTORY TEST...
    local root=$1/root
    shift
    mkdir -p "$root"/{bin,dev,proc,sys,tmp,var/tmp,tests}
    cp "$cache/kernel/brd.ko" "$root/"
    truncate -s 64M "$root/disk"
    /sbin/mke2fs -q -t ext2 -m 0 "$root/disk"
    cp "$(busybox)" "$root/bin/busybox"
    cp tests/guest/init "$root/init"
    chmod 755 "$root/init"
    local number=0
    for test in "$@"; do
        if [ "$(basename "$test")" = plimsoll ]; then
            cp "$test" "$root/bin/plimsoll"
        else
            # Without the hash after the name.
            cp "$test" "$root/tests/$(printf '%02d' $number)-$(basename "$test" | sed 's/-[0-9a-f]\{16\}$//')"
            number=$((number + 1))
        fi
    done
    strip "$root"/tests/* "$root"/bin/plimsoll 2>/dev/null || true
    printf '%s\n' "${GUEST_ARGS:-}" >"$root/args"
    (cd "$root" && find . | cpio --quiet -o -H newc | gzip -1) >"$(dirname "$root")/initrd.gz"
}

boot() { # KERNEL INITRD CONSOLE
    for _ in 1 2 3 4 5; do
        boot_once "$@"
        grep -q '^guest: the clock is off' "$3" || break
    done
    grep -q '^guest: all passed$' "$3" || { echo "the guest's tests failed" >&2; exit 1; }
}

boot_once() { # KERNEL INITRD CONSOLE
    local status=0
    timeout --foreground "$timeout" qemu-system-x86_64 -M q35 -accel tcg,thread=multi -cpu max -smp 2 -m 1024 \
        -nodefaults -display none -no-reboot -serial stdio -kernel "$1" -initrd "$2" \
        -append "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable clocksource=tsc" </dev/null |
        stdbuf -oL tr -d '\r' | tee "$3" || status=$?
    [ "$status" -ne 124 ] || { echo "the guest did not finish within $timeout s" >&2; exit 1; }
}

main "$@"
