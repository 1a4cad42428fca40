"""The processes that record.sh records, and what it keeps of a trace."""
import hashlib
import json
import lzma
import math
import os
import random
import sys
import time
import zlib


def burn(seconds):
    """Computes for so much CPU time."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        hashlib.sha256(bytes(65536)).digest()


def service():
    """Requests at random times; the rate drifts by a third over some minutes."""
    due = time.monotonic()
    while True:
        rate = 8 * (1 + 0.33 * math.sin(due / 47)) * (1 + 0.15 * math.sin(due / 11))
        due += random.expovariate(rate)
        time.sleep(max(0.0, due - time.monotonic()))
        burn(random.choice([0.002, 0.004, 0.004, 0.01]))


def files():
    """The files of the system, in no order."""
    found = [os.path.join(directory, name) for directory, _, names in os.walk("/usr/lib") for name in names]
    random.shuffle(found)
    return [name for name in found if os.path.isfile(name) and 10_000 < os.path.getsize(name) < 3_000_000]


def batch():
    """Compresses files at 5 % of a CPU, in two ways."""
    while True:
        for name in files():
            with open(name, "rb") as file:
                data = file.read()
            before = time.process_time()
            lzma.compress(data, preset=1) if len(data) % 3 else zlib.compress(data, 9)
            time.sleep(19 * (time.process_time() - before))


def spiky():
    """Idle but for a tick a second, and busy for 60 to 120 s every 4 to 8 minutes."""
    while True:
        idle = random.uniform(180, 360)
        for _ in range(int(idle)):
            burn(0.003)
            time.sleep(1)
        busy = time.monotonic() + random.uniform(60, 120)
        while time.monotonic() < busy:
            burn(0.01)
            time.sleep(0.1)


def build():
    """Many short compilations, a long one, and a pause."""
    while True:
        for _ in range(40):
            burn(random.uniform(0.005, 0.06))
            time.sleep(random.uniform(0.2, 1.5))
        for _ in range(60):
            burn(0.02)
            time.sleep(0.2)
        time.sleep(random.uniform(10, 25))


def strip():
    """Keeps the header, and of a tick every 10 s the pods' counters of CPU."""
    last = 0
    for line in sys.stdin:
        read = json.loads(line)
        if "header" in read:
            read["header"]["bootId"] = ""
        elif "tick" in read:
            sample = read["tick"]["sample"]
            if sample["at"] < last + 9_500_000_000:
                continue
            last = sample["at"]
            pods = [{key: pod[key] for key in ("uid", "at", "cpuNanos") if key in pod} for pod in sample.get("pods", [])]
            read["tick"]["sample"] = {"at": sample["at"], "node": {}, "pods": pods}
        else:
            continue
        print(json.dumps(read, separators=(",", ":")))


random.seed(2026)
{"service": service, "batch": batch, "spiky": spiky, "build": build, "strip": strip}[sys.argv[1]]()
