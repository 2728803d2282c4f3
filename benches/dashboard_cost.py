#!/usr/bin/env python3
"""Measures the cost of the dashboard: runs the same short training of `tiny` with plain lines and with the dashboard in
a terminal of 120×36, in turn, and prints the ratio of each round.

    benches/dashboard_cost.py --finetune target/release/finetune --rounds 5

Time and processor time per step come from each run's event log, from step 50 to the last; the limit is on the time. On
a busy machine both vary, because the dashboard draws ten times per second, no matter how long steps take. The share of
the machine that threads other than the training ones use is reliable there too. Checkpoints, evaluations and samples
are off. The terminal is a pseudo-terminal whose output this script discards.
"""

import argparse
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

WARM_UP = 50


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetune", default="target/release/finetune", help="our program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--size", default="120x36", help="columns x rows")
    return parser.parse_args()


def screen_seconds(pid):
    """Processor time so far of the threads that do not train."""
    seconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text()
            if not name.startswith(("training", "compute")):
                seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            pass  # It has ended meanwhile.
    return seconds


def train(a, folder, output):
    """One run with `--plain` or `--dashboard`: milliseconds a step, milliseconds of processor time a step, and the share
    of the machine that went to other threads than the training ones."""
    command = [os.path.abspath(a.finetune), output, "--run", "cost", "--steps", str(a.steps)]
    command += ["--batch-size", str(a.batch_size), "--seq-len", str(a.seq_len), "--save-every", "0", "--eval-every", "0"]
    command += ["--set", "train.eval_batches=1", "--set", "train.sample_tokens=0"]
    leader, follower = pty.openpty()
    columns, rows = map(int, a.size.split("x"))
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    )
    os.close(follower)
    log = folder / "checkpoints" / "cost" / "events.jsonl"
    end, looks = b"", []
    while process.poll() is None:
        try:
            looks.append((time.monotonic(), screen_seconds(process.pid)))
        except OSError:
            pass  # The process has ended meanwhile.
        if not select.select([leader], [], [], 0.2)[0]:
            # Silent: the summary stays until somebody leaves it.
            if log.exists() and b'"event":"finished"' in log.read_bytes()[-4096:]:
                os.write(leader, b"q")
            continue
        try:
            end = (end + os.read(leader, 1 << 16))[-2000:]
        except OSError:
            break
    os.close(leader)
    if process.wait() != 0:
        sys.exit(f"`{' '.join(command)}` failed with {process.returncode}:\n{end.decode(errors='replace')}")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    first, last = steps[WARM_UP], steps[-1]
    count = last["step"] - first["step"]
    (began, before), (ended, after) = looks[len(looks) // 10], looks[-1]
    share = (after - before) / (ended - began) / len(os.sched_getaffinity(0))
    milliseconds = [(last[what] - first[what]) / count * 1e3 for what in ("s", "cpu_seconds")]
    return *milliseconds, share


def main():
    a = arguments()
    rounds = []
    for number in range(a.rounds):
        # The order changes from round to round, so that a slow drift of the machine falls on both.
        order = ["--plain", "--dashboard"] if number % 2 == 0 else ["--dashboard", "--plain"]
        cost = {}
        for output in order:
            with tempfile.TemporaryDirectory() as folder:
                cost[output] = train(a, Path(folder), output)
        plain, dashboard = cost["--plain"], cost["--dashboard"]
        rounds.append((dashboard[0] / plain[0] - 1, dashboard[1] / plain[1] - 1, dashboard[2] - plain[2]))
        for output, (ms, cpu, share) in cost.items():
            print(f"{output:12} {ms:.2f} ms a step, {cpu:.2f} ms of processor time, other threads {share:.2%}", flush=True)
    names = ["time a step", "processor time a step", "share of the machine"]
    for what, values in zip(names, zip(*rounds)):
        print(f"{what}: {statistics.median(values):+.2%} (rounds {min(values):+.2%} to {max(values):+.2%})")


if __name__ == "__main__":
    main()
