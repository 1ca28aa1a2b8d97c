#!/usr/bin/env bash
# Two memory nodes on any machine: a QEMU guest (software emulation) that runs scripts/numa_guest.py on this tree.
#
# The guest boots Debian's kernel, sees this machine's files read-only over 9p, and uses the interpreter named by
# PYTHON. It shows where pages and threads really go; its speed says nothing. Takes some minutes.
#
#   apt-get install qemu-system-x86 busybox-static     # QEMU 7.2 or newer: AVX2 in software
#   PYTHON=$PWD/.venv/bin/python scripts/numa_guest.sh
#
# WORK: where the kernel and the guest's first files are kept. ACCEL: tcg, or kvm where that is wanted.
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$(command -v python3)}
work=${WORK:-${TMPDIR:-/tmp}/strata-numa-guest}
busybox=$(command -v busybox || true)

fail() { echo "numa_guest: $*" >&2; exit 1; }
command -v qemu-system-x86_64 >/dev/null || fail "no qemu-system-x86_64: apt-get install qemu-system-x86"
[ -n "$busybox" ] && "$busybox" --list | grep -qx insmod || fail "no busybox with insmod: apt-get install busybox-static"
ldd "$busybox" >/dev/null 2>&1 && fail "$busybox needs libraries: apt-get install busybox-static"
mkdir -p "$work"
cd "$work"

if [ ! -e kernel/boot ]; then
  package=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: //p' | head -1)
  [ -n "$package" ] || fail "no linux-image-amd64 in the package lists: apt-get update"
  apt-get download -q "$package"
  rm -rf kernel.part && dpkg-deb -x linux-image-*.deb kernel.part && mv kernel.part kernel
fi

modules="drivers/virtio/virtio drivers/virtio/virtio_ring drivers/virtio/virtio_pci_modern_dev
  drivers/virtio/virtio_pci_legacy_dev drivers/virtio/virtio_pci net/9p/9pnet net/9p/9pnet_virtio
  fs/netfs/netfs fs/fscache/fscache fs/9p/9p"
rm -rf first && mkdir -p first/bin first/modules first/proc first/host
cp "$busybox" first/bin/busybox
names=""
for module in $modules; do  # what is built into a kernel has no file
  for file in kernel/lib/modules/*/kernel/"$module".ko*; do
    if [ -e "$file" ]; then cp "$file" first/modules/ && names="$names ${file##*/}"; fi
  done
done
cat > first/init <<INIT
#!/bin/busybox sh
b=/bin/busybox
\$b mount -t proc proc /proc
# They need each other, and nobody has written down in which order: what fails now may succeed next time.
for round in 1 2 3 4; do
  for name in $names; do \$b insmod /modules/\$name 2>/dev/null; done
done
\$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=524288,cache=loose host /host || echo "no files"
for kind in proc sysfs:sys devtmpfs:dev tmpfs:tmp tmpfs:run; do
  \$b mount -t \${kind%%:*} none /host/\${kind##*:}
done
\$b chroot /host /usr/bin/env -i PATH=/usr/bin:/bin HOME=/tmp PYTHONPATH=$tree PYTHONDONTWRITEBYTECODE=1 \\
  XDG_CACHE_HOME=/tmp LANG=C.UTF-8 $python $tree/scripts/numa_guest.py
echo "numa_guest: exit \$?"
\$b poweroff -f
INIT
chmod +x first/init
(cd first && find . | "$busybox" cpio -o -H newc 2>/dev/null | gzip) > first.gz

# Sockets 0 and 1, two cores each; the far node's memory is 2.1 times as far, as firmware of such servers says.
timeout "${SECONDS_AT_MOST:-1500}" nice -n 19 qemu-system-x86_64 -accel "${ACCEL:-tcg,thread=multi}" -cpu max \
  -smp 4,sockets=2,cores=2,threads=1 -m 2G -nographic -no-reboot -nic none \
  -object memory-backend-ram,id=near,size=1G -object memory-backend-ram,id=far,size=1G \
  -numa node,nodeid=0,memdev=near,cpus=0-1 -numa node,nodeid=1,memdev=far,cpus=2-3 \
  -numa dist,src=0,dst=1,val=21 \
  -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
  -kernel kernel/boot/vmlinuz-* -initrd first.gz \
  -append "console=ttyS0 panic=-1 quiet" < /dev/null | tr -d '\r' | tee guest.log
grep -qx "numa_guest: exit 0" guest.log || fail "the guest did not end well; its words are in $work/guest.log"
