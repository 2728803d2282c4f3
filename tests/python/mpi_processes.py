#!/usr/bin/env python3
"""Compares several processes under mpirun with one: logs and checkpoints, kills and resumes.

Usage: tests/python/mpi_processes.py PROGRAM [--kills N] [--full]. PROGRAM is built with `--features mpi`. `--full`
trains every model in every type by 2, 3 and 4 processes and measures their memory, which is too long for CI.
"""

import argparse
import array
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMPARED = {"step", "eval", "overflow", "dtype_change", "grad_variance", "fp32_probe"}
TIMES = ["time", "tokens_per_s", "rss_bytes", "peak_rss_bytes", "cpu_seconds", "gpu"]
MPIRUN = [str(Path(__file__).resolve().parents[2] / ".ci/mpirun")]
SMALL = ["--batch-size", "2", "--seq-len", "32", "--plain",
         "--set", "train.eval_every=4", "--set", "train.eval_batches=5", "--set", "train.sample_tokens=0",
         "--set", "telemetry.grad_stats_every=1", "--set", "telemetry.grad_histogram_every=1"]
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 64,
         "intermediate_size": 1100, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
         "hidden_act": "silu"}


def write_llama(path):
    """Random weights for `LLAMA`, as a safetensors file."""
    width, inner, heads, vocabulary = 64, LLAMA["intermediate_size"], {"q": 64, "k": 32, "v": 32, "o": 64}, LLAMA["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width), "model.norm.weight": (width,)}
    for layer in range(LLAMA["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}{norm}_layernorm.weight": (width,) for norm in ["input", "post_attention"]}
        shapes |= {f"{name}self_attn.{head}_proj.weight": (rows, width) for head, rows in heads.items()}
        shapes |= {f"{name}mlp.{part}_proj.weight": (inner, width) for part in ["gate", "up"]}
        shapes[f"{name}mlp.down_proj.weight"] = (width, inner)
    chance, header, values = random.Random(3), {}, array.array("f")
    for name, shape in shapes.items():
        start = 4 * len(values)
        count = math.prod(shape)
        values.extend([1.0] * count if len(shape) == 1 else [chance.gauss(0, 0.05) for _ in range(count)])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, 4 * len(values)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values.tobytes())


def command(program, processes, *arguments):
    launch = MPIRUN + ["-n", str(processes)] if processes > 1 else []
    return [*launch, program, *map(str, arguments)]


def run(program, processes, *arguments):
    words = command(program, processes, *arguments)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done


def events(folder):
    """What a log says but for times; of steps that were repeated the last attempt."""
    lines = {}
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] not in COMPARED:
            continue
        for key in ["t", "s", *TIMES]:
            event.pop(key, None)
        lines[event["step"], event["event"]] = json.dumps(event, sort_keys=True)
    return lines


def last(folder):
    return folder / (folder / "latest").read_text().strip()


def check_same(program, name, one, many):
    ours, theirs = events(one), events(many)
    if ours != theirs:
        key = next(key for key in sorted(ours | theirs) if ours.get(key) != theirs.get(key))
        sys.exit(f"{name}: {many.name} differs from {one.name} at {key}:\n{ours.get(key)}\n{theirs.get(key)}")
    found = subprocess.run([program, "checkpoint", "diff", last(one), last(many)], capture_output=True, text=True)
    if found.returncode != 0:
        sys.exit(f"{name}: {found.stdout}{found.stderr}")


def identical(program, full):
    run(program, 1, "--run", "tokenizer", "--steps", "1", "--dtype", "fp32", "--set", "train.sample_tokens=0")
    llama = Path("llama")
    llama.mkdir()
    (llama / "config.json").write_text(json.dumps(LLAMA))
    write_llama(llama / "model.safetensors")
    shutil.copy(last(Path("checkpoints/tokenizer")) / "tokenizer.json", llama)
    families = {"gpt2": ["--model", "tiny"], "llama": ["--model", "llama", "--data", "grammar"]}
    lora = ["--lora", "r=4,alpha=8,dropout=0.1"]
    if full:
        families |= {f"{family}-lora": [*model, *lora] for family, model in families.items()}
    policies = {"fp32": [], "fp16": ["--init-scale", 2**22, "--set", "scaler.growth_interval=3"], "bf16": []}
    cases = {
        f"{family}-{policy}": [*model, "--dtype", policy, *more]
        for family, model in families.items()
        for policy, more in policies.items()
    }
    fp16 = [*families["gpt2"], "--dtype", "fp16", "--init-scale", 2**22]
    cases |= {
        "one-micro-batch": [*fp16, "--grad-accum", "1"],
        "seven-micro-batches": [*fp16, "--grad-accum", "7", "--set", "dropout.residual=0.1"],
        "predictive": [*fp16, "--set", "scaler.mode='predictive'"],
        "fp8": [*fp16, "--set", "precision.fp8.block=1", "--set", "telemetry.grad_variance_every=2"],
        "fallback": [*fp16, "--set", "precision.fallback='layer'", "--set", "precision.fallback_overflows=1", "--set",
                     f"precision.fallback_max_scale={2**22}", "--set", "precision.fallback_cooldown=3"],
        "lora": [*fp16, *lora],
        "dora": [*fp16, "--lora", "r=2,alpha=8,use_dora,modules_to_save=ln_f"],
        "probe": [*fp16, "--set", "telemetry.probe_every=3"],
        # llama's matrices have more than one block of 65,536 elements, so that shards are cut inside of them.
        "adamw8bit": [*families["llama"], "--dtype", "fp16", *policies["fp16"], "--optimizer", "adamw8bit"],
        "stochastic": [*families["llama"], "--dtype", "p=bf16,c=bf16,g=bf16,r=f32", "--set", "telemetry.probe_every=3"],
    }
    for name, arguments in cases.items():
        every = full or name in ("gpt2-fp16", "llama-bf16", "seven-micro-batches", "lora", "adamw8bit", "stochastic")
        few = [2, 3, 4] if every else [3]
        for processes in [1, *few]:
            batches = [] if "--grad-accum" in arguments else ["--grad-accum", "4"]
            for shard in ["optimizer", "gradients"] if every and processes > 1 else ["optimizer"]:
                more = [] if shard == "optimizer" else ["--shard", shard]
                run_name = f"{name}-{processes}" + "".join(f"-{word}" for word in more[1:])
                run(program, processes, *SMALL, *batches, "--steps", "10", *arguments, *more, "--run", run_name)
        if name == "fallback" and not any(kind == "dtype_change" for _, kind in events(Path("checkpoints/fallback-1"))):
            sys.exit("fallback: no layer changed its type, so nothing was tried")
        overflows = sum(kind == "overflow" for _, kind in events(Path(f"checkpoints/{name}-1")))
        if "fp16" in arguments and name != "predictive" and overflows == 0:
            sys.exit(f"{name}: no step overflowed, so nothing was tried")
        for others in sorted(Path("checkpoints").glob(f"{name}-[2-4]*")):
            check_same(program, name, Path(f"checkpoints/{name}-1"), others)
        print(f"{name}: 1 process and {few} agree{', with either sharding' if every else ''}, {overflows} overflows", flush=True)


def errors(program):
    """One message, whoever fails, and a code that is not 0; nobody waits for ever."""
    Path("notes.txt").write_text("Text that process 1 finds, although it starts in another folder.\n" * 100)
    train = [program, "--data", "notes.txt", "--steps", "1"]
    done = subprocess.run([*MPIRUN, "-n", "1", *train, ":", "-n", "1", "-wdir", "/", *train], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        sys.exit(f"notes.txt from another folder: code {done.returncode}:\n{done.stderr}")
    for name, words in [
        ("grad_accum", command(program, 3, "--grad-accum", "0")),
        ("/nowhere/at/all", command(program, 3, "--model", "/nowhere/at/all")),
        ("fused kernels", command(program, 3, "--kernels", "candle")),
        # Process 1 alone.
        ("instruction set", [*MPIRUN, "-n", "1", *train, ":", "-n", "1", "env", "FINETUNE_ISA=portable", *train]),
        # By the launcher of a different MPI library.
        ("MPI connects none of them", ["env", "PMI_SIZE=2", "PMI_RANK=0", *train]),
    ]:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        told = done.stderr.count("error: ")
        if done.returncode == 0 or told != 1 or name not in done.stderr:
            sys.exit(f"{name}: code {done.returncode}, {told} messages:\n{done.stderr}")
        print(f"{name}: code {done.returncode}, one message", flush=True)


def ranks(launcher):
    """The processes of a job by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher:
                environment = (folder / "environ").read_bytes().split(b"\0")
                rank = next(word for word in environment if word.startswith(b"OMPI_COMM_WORLD_RANK="))
                found[int(rank.split(b"=")[1])] = int(folder.name)
        except (OSError, StopIteration):
            continue
    return found


LONG = [*SMALL, "--grad-accum", "4", "--dtype", "fp16", "--init-scale", 2**22, "--steps", "60", "--set", "checkpoint.save_every=3",
        "--set", "checkpoint.keep_last=2"]


def stalled(program):
    """A process that stands still is named, and the job ends."""
    environment = {**os.environ, "FINETUNE_MPI_TIMEOUT_S": "3"}
    words = command(program, 3, *LONG, "--run", "stalled")
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    folder = Path("checkpoints/stalled")
    wait_for(lambda: (folder / "latest").exists(), 60, "a checkpoint")
    os.kill(ranks(job.pid)[1], signal.SIGSTOP)
    began = time.monotonic()
    _, said = job.communicate(timeout=30)
    if job.returncode == 0 or said.count("error: ") != 1 or "process 1 on" not in said:
        sys.exit(f"stalled: code {job.returncode}:\n{said}")
    print(f"stalled: ended after {time.monotonic() - began:.1f} s, naming process 1", flush=True)


def slow(program):
    """Every 50 steps a line says how fast each process is and how long it waits; one that is slow in it is named."""
    words = command(program, 3, "--batch-size", "2", "--seq-len", "16", "--grad-accum", "3", "--steps", "50", "--plain",
                    "--set", "train.eval_every=0", "--set", "train.sample_tokens=0", "--run", "slow")
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: len(ranks(job.pid)) == 3, 60, "process")
    process = ranks(job.pid)[1]
    with contextlib.suppress(ProcessLookupError):
        while job.poll() is None:
            # It has a fifth of the time.
            for order, seconds in [(signal.SIGSTOP, 0.04), (signal.SIGCONT, 0.01)]:
                os.kill(process, order)
                time.sleep(seconds)
    said = job.communicate()[0]
    line = next((line for line in said.splitlines() if line.startswith("processes step=50 ")), "")
    told = re.findall(r"process (\d) on `[^`]+`: \d+ tokens/s, \d+ % waiting", line)
    if job.returncode != 0 or told != ["0", "1", "2"] or re.findall("slow: process 1 on `[^`]+`$", line) == []:
        sys.exit(f"slow: code {job.returncode}:\n{said[-2000:]}")
    print(f"slow: {line}", flush=True)


def memory(program):
    """Bytes for each parameter, as the difference of two models' peaks: weights and gradients in FP16, sums of micro-batches in
    FP32, and of 12 bytes of masters and moments and 4 of the step's sum a process's share."""
    tokenizer = last(Path("checkpoints/tokenizer")) / "tokenizer.json"
    sizes = [10, 40]
    for layers in sizes:
        model = Path(f"layers-{layers}")
        model.mkdir()
        shape = {"vocab_size": 260, "n_embd": 256, "n_layer": layers, "n_head": 4, "n_positions": 64}
        (model / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **shape}))
        shutil.copy(tokenizer, model)
    for processes, expected in [(1, 2 + 2 + 8 + 12), (2, 2 + 2 + 4 + 16 / 2), (4, 2 + 2 + 16 / 4)]:
        found = []
        for layers in sizes:
            name = f"memory-{layers}-{processes}"
            run(program, processes, "--model", f"layers-{layers}", "--init", "random", "--dtype", "fp16", "--init-scale", "1024",
                "--batch-size", "1", "--seq-len", "16", "--grad-accum", "4", "--steps", "3", "--threads", "1", "--plain",
                "--set", "train.sample_tokens=0", "--set", "checkpoint.save_every=0", "--run", name)
            log = [json.loads(line) for line in (Path("checkpoints") / name / "events.jsonl").read_text().splitlines()]
            found.append((next(event["parameters"] for event in log if event["event"] == "started"),
                          max(event["peak_rss_bytes"] for event in log if event["event"] == "step")))
        (few, small), (many, large) = found
        each = (large - small) / (many - few)
        # MPI's own buffers take some 10 MB more or less.
        if abs(each - expected) > 2:
            sys.exit(f"memory: {each:.1f} bytes for each parameter in each of {processes} processes, not {expected:.0f}")
        print(f"memory: {each:.1f} bytes for each parameter in each of {processes} processes, expected {expected:.0f}", flush=True)


def wait_for(condition, seconds, what):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            sys.exit(f"no {what} within {seconds} s")
        time.sleep(0.002)


def kills(program, count):
    """SIGKILL of each process in turn, in mid-step and in mid-save; each time the run goes on with another number of processes."""
    run(program, 1, *LONG, "--run", "whole")
    chance, folder, slowest = random.Random(5), Path("checkpoints/killed"), 0.0
    # Half of the run's time for all kills together, so that on no machine the run ends before the last one.
    times = [json.loads(line)["s"] for line in Path("checkpoints/whole/events.jsonl").read_text().splitlines()]
    longest = (times[-1] - times[0]) / count / 2
    in_saves = 0
    victims_in_turn = sorted(((count, rank) for count in (2, 3, 4) for rank in range(count)), key=lambda it: it[1])
    for kill in range(count):
        processes, victim = victims_in_turn[kill % len(victims_in_turn)]
        go_on = ["--resume", "killed"] if (folder / "config.toml").exists() else [*LONG, "--run", "killed"]
        words = command(program, processes, *go_on, "--shard", ["optimizer", "gradients"][kill % 2])
        job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        log = folder / "events.jsonl"
        before = log.stat().st_size if log.exists() else 0
        wait_for(lambda: job.poll() is not None or (log.exists() and log.stat().st_size > before), 60, "step")
        saving = kill % 2 == 1
        if saving:
            wait_for(lambda: job.poll() is not None or any(folder.glob(".*tmp*")), 60, "save")
            time.sleep(chance.random() * min(longest, 0.05))
        else:
            time.sleep(chance.random() * longest)
        victims = ranks(job.pid)
        if job.poll() is not None or len(victims) < processes:
            sys.exit(f"kill {kill}: the run was over too early:\n{job.communicate()[1]}")
        in_saves += any(folder.glob(".*tmp*"))
        os.kill(victims[victim], signal.SIGKILL)
        began = time.monotonic()
        _, said = job.communicate(timeout=30)
        slowest = max(slowest, time.monotonic() - began)
        if job.returncode == 0 or slowest > 10 or said.count("exited on signal 9") != 1 or "error:" in said:
            sys.exit(f"kill {kill}: code {job.returncode} after {slowest:.1f} s:\n{said}")
    run(program, 3, "--resume", "killed")
    check_same(program, "killed", Path("checkpoints/whole"), folder)
    print(f"{count} kills, {in_saves} of them in a save: ended within {slowest:.1f} s;"
          " resumed to the same bits", flush=True)


def proof(program):
    """`verify-distributed` finds no difference, and names what differs where several processes compute otherwise than one."""
    words = ["verify-distributed", "--steps", "6", "--init-scale", 2**19, "--batch-size", "1", "--seq-len", "16"]
    print(run(program, 1, *words).stdout.strip().splitlines()[-1], flush=True)
    other = ["--launcher", f"env FINETUNE_ISA=portable {MPIRUN[0]}"]
    done = subprocess.run(command(program, 1, *words, *other), capture_output=True, text=True, timeout=300)
    tensor = re.search(r"^differs, 1 process against 4: .*`\S+weight`.*", done.stdout, re.MULTILINE)
    if done.returncode != 1 or tensor is None:
        sys.exit(f"verify-distributed with another instruction set: code {done.returncode}:\n{done.stdout[-1000:]}{done.stderr}")
    print(tensor[0], flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("program", type=Path)
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--full", action="store_true")
    arguments = arguments.parse_args()
    program, began = str(arguments.program.resolve()), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="finetune-mpi-") as folder:
        os.chdir(folder)
        errors(program)
        identical(program, arguments.full)
        stalled(program)
        slow(program)
        if arguments.full:
            memory(program)
        kills(program, arguments.kills)
        proof(program)
        os.chdir("/")
    print(f"done in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
