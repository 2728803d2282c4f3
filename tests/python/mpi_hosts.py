#!/usr/bin/env python3
"""Compares the time of a step with its prediction, for hosts that are network namespaces with MPI over TCP and limited
links.

Usage, as root: tests/python/mpi_hosts.py PROGRAM. PROGRAM is built with `--features mpi`. docs/scale.md has the
formula.
"""

import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BRIDGE, PREFIX, NETWORK = "ftmpi", "ftmpi-", "10.213.77."
MICRO_BATCHES, STEPS = 4, 23
MPIRUN = str(Path(__file__).resolve().parents[2] / ".ci/mpirun")
# TCP's and IP's headers in a packet of 1,500 bytes, and Ethernet's, which `tc` counts.
WIRE = 1514 / 1448
# Elements of a block, at which shards are cut.
BLOCK = 65_536
RUN = ["--model", "tiny", "--dtype", "fp16", "--grad-accum", str(MICRO_BATCHES), "--batch-size", "2", "--seq-len", "64",
       "--steps", str(STEPS), "--threads", "1", "--init-scale", "1024", "--plain", "--set", "train.sample_tokens=0",
       "--set", "train.eval_every=0", "--set", "train.eval_batches=1", "--set", "checkpoint.save_every=0"]


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def remove():
    for line in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines():
        if line.startswith(PREFIX):
            name = line.split()[0]
            # With its namespace a link goes only after a while.
            subprocess.run(["ip", "link", "del", f"{PREFIX}v{name.removeprefix(PREFIX)}"], stderr=subprocess.DEVNULL)
            ip("netns", "del", name)
    subprocess.run(["ip", "link", "del", BRIDGE], stderr=subprocess.DEVNULL)


def make(hosts):
    remove()
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("link", "set", BRIDGE, "up")
    for host in range(1, hosts + 1):
        name, link = f"{PREFIX}{host}", f"{PREFIX}v{host}"
        ip("netns", "add", name)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", link, "master", BRIDGE, "up")
        ip("-n", name, "addr", "add", f"{NETWORK}{host}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")


def limit(hosts, megabits):
    # Both directions of every link. A queue that drops nothing: after a loss TCP stands still for 200 ms, which is
    # another model. So is a burst of more than a few packets, which an idle link would save up for the next exchange.
    shape = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "4kb", "limit", "16mb"]
    for host in range(1, hosts + 1):
        inside = ["ip", "netns", "exec", f"{PREFIX}{host}"]
        subprocess.run([*inside, "tc", "qdisc", "replace", "dev", "eth0", *shape], check=True)
        subprocess.run(["tc", "qdisc", "replace", "dev", f"{PREFIX}v{host}", *shape], check=True)
        # BBR, where that is the default, leaves a part of such a link idle while it looks for its rate.
        subprocess.run([*inside, "sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"], check=True)


def times(run):
    """Milliseconds of a step by the wall clock, of its passes, and of the backward ones, without the first steps."""
    lines = [json.loads(line) for line in (Path("checkpoints") / run / "events.jsonl").read_text().splitlines()]
    steps = [line["time"] for line in lines if line["event"] == "step"][3:]
    wall = statistics.median(step["step_ms"] for step in steps)
    backward = statistics.median(step["backward_ms"] for step in steps)
    return wall, statistics.median(step["forward_ms"] + step["backward_ms"] for step in steps), backward


def largest_parts(run, hosts):
    """Elements of the largest part of each block and of the rest, as `collective/shards.rs` cuts the parameters of a run; and of all."""
    with (Path("checkpoints") / run / f"step-{STEPS:06}" / "master.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    units, ends, elements = {}, [0] * (hosts + 1), 0
    for name in sorted(header):
        block = re.match(r"(?:h|layers)\.(\d+)\.", name)
        units.setdefault(int(block[1]) if block else math.inf, []).append(math.prod(header[name]["shape"]))
    parts = []
    for lengths in (units[unit] for unit in sorted(units)):
        starts, cuts = [0, *itertools.accumulate(lengths)], [0]
        borders = [border for start, end in zip(starts, starts[1:]) for border in (*range(start, end, BLOCK), end)]
        elements += starts[-1]
        for rank in range(hosts + 1):
            ideal = min(max(elements * rank // hosts - ends[rank], 0), starts[-1])
            # The block's border that is nearest, of two the later one.
            cuts.append(max(min(reversed(borders), key=lambda border: abs(border - ideal)), cuts[-1]))
            ends[rank] += cuts[-1]
        parts.append(max(after - before for before, after in zip(cuts[1:], cuts[2:])))
    return parts[:-1], parts[-1], max(after - before for before, after in zip(ends, ends[1:]))


def predicted(hosts, megabits, parts, passes, backward, rest):
    """Milliseconds of a step, from those of its passes in each process, of one backward pass, of the rest of a step in one, and the
    largest parts of shards."""
    blocks, others, shard = parts
    share = -(-MICRO_BATCHES // hosts)
    # A share of one micro-batch is sent in FP16, of several in FP32; weights come back in FP16. What decides is the
    # link of the host with the largest part: all others send it theirs of that part, and it sends each of them its
    # weights.
    def sent(elements, width):
        return (hosts - 1) * elements * width * WIRE / (megabits * 1e6 / 8) * 1e3

    # A block's gradients leave while those of the blocks below are computed.
    free, width = 0.0, 2 if share == 1 else 4
    for index, part in enumerate(blocks):
        free = max(free, backward * (index + 1) / len(blocks)) + sent(part, width)
    exposed = max(free - backward, 0) + sent(others, width)
    return passes + rest / hosts + exposed + sent(shard, 2)


def main():
    program = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory(prefix="finetune-hosts-") as folder:
        os.chdir(folder)
        agent = Path("agent").resolve()
        # What mpirun takes for ssh: the last number of the address is the namespace's.
        agent.write_text(f'#!/bin/sh\nhost={PREFIX}${{1##*.}}; shift\n'
                         'exec ip netns exec "$host" unshare -u sh -c "hostname $host; $*"\n')
        agent.chmod(0o755)
        worst = 0.0
        try:
            subprocess.run([program, *RUN, "--run", "alone"], check=True, capture_output=True)
            wall, passes, _ = times("alone")
            print(f"1 process: {wall:.0f} ms a step, {passes:.0f} ms of it passes")
            for hosts in (2, 4):
                make(hosts)
                for megabits in (20, 60):
                    limit(hosts, megabits)
                    run = f"hosts-{hosts}-{megabits}"
                    addresses = ",".join(f"{NETWORK}{host}" for host in range(1, hosts + 1))
                    words = ["ip", "netns", "exec", f"{PREFIX}1", "unshare", "-u", "sh", "-c", f'hostname {PREFIX}1; exec "$@"', "sh",
                             MPIRUN, "-n", str(hosts), "--host", addresses,
                             "--mca", "plm_rsh_agent", str(agent), "--mca", "btl", "tcp,self", "--mca", "pml", "ob1",
                             "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0",
                             program, *RUN, "--run", run]
                    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
                    if done.returncode != 0:
                        sys.exit(f"{hosts} hosts ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
                    measured, shared, backward = times(run)
                    one_pass = backward / -(-MICRO_BATCHES // hosts)
                    expected = predicted(hosts, megabits, largest_parts("alone", hosts), shared, one_pass, wall - passes)
                    off = expected / measured - 1
                    worst = max(worst, abs(off))
                    same = subprocess.run([program, "checkpoint", "diff", f"checkpoints/alone/step-{STEPS:06}",
                                           f"checkpoints/{run}/step-{STEPS:06}"], capture_output=True, text=True)
                    print(f"{hosts} hosts, {megabits} Mbit/s: {measured:.0f} ms a step, predicted {expected:.0f} ({off:+.0%}),"
                          f" {shared:.0f} of them passes;"
                          f" {'the same bits' if same.returncode == 0 else same.stdout}", flush=True)
                    if same.returncode != 0:
                        sys.exit(1)
        finally:
            os.chdir("/")
            remove()
    sys.exit(f"off by {worst:.0%}" if worst > 0.2 else 0)


if __name__ == "__main__":
    main()
