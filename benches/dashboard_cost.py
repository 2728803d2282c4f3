#!/usr/bin/env python3
"""What the dashboard costs training: runs the same short training of `tiny` as plain lines and under the dashboard in a
terminal of 120×36, in turn, A B A B, and prints the ratio round by round.

    benches/dashboard_cost.py --finetune target/release/finetune --rounds 5

Steps a second and processor time a step are read from each run's own event log, between step 50 and the last: the first is
what the dashboard is held to, the second is what a busy machine can still measure. Checkpoints, evaluations and samples are
switched off. The terminal is a pseudo-terminal that this script reads and forgets.
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


def train(a, folder, output):
    """One run with `--plain` or `--dashboard`: milliseconds, and milliseconds of processor time, a step."""
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
    drawn, end = 0, b""
    while process.poll() is None:
        if not select.select([leader], [], [], 0.2)[0]:
            # Silent: the summary stays until somebody leaves it.
            if log.exists() and b'"event":"finished"' in log.read_bytes()[-4096:]:
                os.write(leader, b"q")
            continue
        try:
            end = (end + os.read(leader, 1 << 16))[-2000:]
        except OSError:
            break
        drawn += 1
    os.close(leader)
    if process.wait() != 0:
        sys.exit(f"`{' '.join(command)}` failed with {process.returncode}:\n{end.decode(errors='replace')}")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    first, last = steps[WARM_UP], steps[-1]
    count = last["step"] - first["step"]
    return (last["s"] - first["s"]) / count * 1e3, (last["cpu_seconds"] - first["cpu_seconds"]) / count * 1e3


def main():
    a = arguments()
    ratios = []
    for round_number in range(a.rounds):
        # The order changes from round to round, so that a slow drift of the machine falls on both.
        order = ["--plain", "--dashboard"] if round_number % 2 == 0 else ["--dashboard", "--plain"]
        cost = {}
        for output in order:
            with tempfile.TemporaryDirectory() as folder:
                cost[output] = train(a, Path(folder), output)
        ratio = [dashboard / plain - 1 for dashboard, plain in zip(cost["--dashboard"], cost["--plain"])]
        ratios.append(ratio)
        figures = "   ".join(f"{output} {ms:.3f} ms, processor {cpu:.3f} ms" for output, (ms, cpu) in cost.items())
        print(f"{figures}   {ratio[0]:+.1%} time, {ratio[1]:+.1%} processor", flush=True)
    for what, values in zip(["time", "processor time"], zip(*ratios)):
        print(f"{what} a step: {statistics.median(values):+.2%} (rounds {min(values):+.2%} to {max(values):+.2%})")


if __name__ == "__main__":
    main()
