#!/usr/bin/env python3
"""Compares `--device cuda` with the CPU: prints one table, and exits with 1 if a row failed.

    cargo build --release --features cuda
    cargo test --release --features cuda --test cuda --no-run        # prints where the test program is
    tests/python/gpu.py --tests target/release/deps/cuda-…

    .ci/cuda-stand-in target/ci/stand-in                             # no GPU: candle's kernels run on the CPU, small and slow
    tests/python/gpu.py --stand-in target/ci/stand-in --finetune target/debug/finetune …

Rows: candle's operations against the CPU's; whole runs of `tiny` against the CPU's, with overflows and growths of the
loss scale; of a small Llama, of a Gemma with DoRA, and of a Llama in quantized blocks (QLoRA); the same with our own
kernels, and with faulty ones; a run that is killed and resumed; the commands that use a trained model
against the CPU's; refusals; and `finetune bench` with candle's kernels and with our own, at README's shapes,
whose first losses must agree. `--only processes`, of a build with `cuda,mpi` and with mpirun: several processes, which
share a GPU if there are fewer. `--only nccl`: several processes that exchange tensors through NCCL. `--only exchange`:
two on one GPU, with NCCL 2.30 or newer, and the time of their exchange.
"""

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Tolerance for the relative difference of two devices' losses after these steps.
STEPS = 30
OWN_STEPS = 12
FAMILY_STEPS = 6
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 3e-3}
BENCHES = [("distilgpt2", "32x32"), ("distilgpt2", "8x1024"), ("smollm2-135m", "8x512")]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--finetune", default=ROOT / "target/release/finetune", type=Path, help="a build with the feature `cuda`")
parser.add_argument("--tests", type=Path, help="the test program `cuda`")
parser.add_argument("--stand-in", type=Path, metavar="DIR", help="what .ci/cuda-stand-in has built")
parser.add_argument("--libraries", type=Path, metavar="DIR", help="where libcudart and libnvrtc are, if the loader must be told")
parser.add_argument("--only", default="operations,runs,families,own,graphs,killed,commands,refused,bench", metavar="PARTS", help="separated by commas")
parser.add_argument("--waves", default="0,1,2,3", help="which of PEERS `ratios` measures")
args = parser.parse_args()

environment = dict(os.environ)
path = [str(folder.resolve()) for folder in (args.stand_in, args.libraries) if folder]
environment["LD_LIBRARY_PATH"] = ":".join(path + [os.environ.get("LD_LIBRARY_PATH", "")])
failed = False


def row(what, passed, figures):
    global failed
    failed |= not passed
    print(f"{'ok' if passed else 'FAILED':<7} {what:<44} {figures}", flush=True)


def run(*command, typed=None, **more):
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, errors="replace", input=typed, env={**environment, **more}
    )
    return result.returncode, result.stdout, result.stderr


def last_line(*texts):
    return next((text.strip().splitlines()[-1] for text in texts if text.strip()), "nothing was said")


def preflight_notices(*texts):
    return [line for text in texts for line in text.splitlines() if "preflight" in line]


def cause(code, out, err):
    """Why a program failed. Kernels that failed their preflight can be the reason for an error that does not name them."""
    return "; ".join([f"exit code {code}: {last_line(err, out)}", *preflight_notices(out, err)])


def command(device, folder, *flags):
    small = ["--batch-size", "2", "--seq-len", "16"] if args.stand_in else []
    fixed = ["--plain", "--set", "train.eval_batches=2", "--set", "train.sample_every=0", "--set", "train.sample_tokens=4"]
    return [args.finetune, "--device", device, "--checkpoint-dir", folder, *fixed, *small, *flags]


def events(folder):
    """A run's events by kind, of its last attempt at each step."""
    kinds = {}
    for line in (next(Path(folder).glob("*/events.jsonl"))).read_text().splitlines():
        event = json.loads(line)
        kinds.setdefault(event["event"], []).append(event)
    kinds["step"] = list({event["step"]: event for event in kinds.get("step", [])}.values())
    return kinds


def train(device, folder, *flags, launcher=(), **more):
    code, out, err = run(*launcher, *command(device, folder, *flags), **more)
    if code != 0:
        raise RuntimeError(f"{device}: {cause(code, out, err)}")
    return {**events(folder), "said": (out + err).splitlines(), "preflight": preflight_notices(out, err)}


def flags_of(dtype, steps=STEPS, save_every=10):
    # An overflow at once, and growths behind it. With the default learning rate the loss leaps at step 5, and from
    # there on any two orders of summation drift apart, two CPUs' as well: by 5e-3 in FP32, by 0.5 in BF16.
    return ["--dtype", dtype, "--steps", steps, "--lr", 3e-4, "--init-scale", 2.0**20, "--set", "scaler.growth_interval=8", "--set", f"checkpoint.save_every={save_every}"]


def skips(run):
    return [overflow["step"] for overflow in run.get("overflow", [])]


def runs():
    for dtype, tolerance in TOLERANCE.items():
        what = f"{STEPS} steps of {dtype} as on the CPU"
        with tempfile.TemporaryDirectory() as gpu_folder, tempfile.TemporaryDirectory() as cpu_folder:
            try:
                gpu = train("cuda", gpu_folder, *flags_of(dtype), "--kernels", "candle")
                cpu = train("cpu", cpu_folder, *flags_of(dtype))
            except RuntimeError as error:
                row(what, False, error)
                continue
        pairs = list(zip(gpu["step"], cpu["step"]))
        worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs)
        fell = gpu["step"][-1]["loss"] < gpu["step"][0]["loss"]
        passed = len(pairs) == STEPS and worst < tolerance and fell
        figures = f"losses within {worst:.1e} (allowed {tolerance:.0e}), {gpu['step'][0]['loss']:.3f} to {gpu['step'][-1]['loss']:.3f}"
        if dtype == "fp16":
            scales = [[math.log2(step["loss_scale"]) for step in of["step"]] for of in (gpu, cpu)]
            grew = any(b > a for a, b in zip(scales[0], scales[0][1:]))
            passed &= 0 < len(skips(gpu)) < STEPS and grew and scales[0] == scales[1]
            figures += f"; overflows at {skips(gpu)} (CPU {skips(cpu)}), scale 2^{scales[0][0]:.0f} to 2^{scales[0][-1]:.0f}"
            figures += f", {sum(b > a for a, b in zip(scales[0], scales[0][1:]))} growths"
        row(what, passed, figures)


def family_config(family):
    return json.loads((ROOT / "tests/golden/families" / family / "config.json").read_text())


def write_shape(model, config):
    """A folder with a model's shape, and the tokenizer of `tiny`: one id for each byte, and one for the end of a text."""
    (Path(model) / "config.json").write_text(json.dumps({**config, "eos_token_id": 256, "bos_token_id": 256}))
    with tempfile.TemporaryDirectory() as folder:
        train("cpu", folder, "--dtype", "fp32", "--steps", 1)
        shutil.copy(next(Path(folder).glob("*/step-*/tokenizer.json")), model)


def families():
    """What GPT-2 has not: rotations, RMS norms, gated units, grouped heads, windows, recurrences; and adapters over a frozen base."""
    # Heads of 16 are the smallest that our own kernels rotate.
    wider = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 48}
    narrow = ["--optimizer", "adamw8bit"]
    dora = ["--lora", "r=4,alpha=8,use_dora"]
    # Rows of whole blocks of Q4_K and Q6_K.
    blocks = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    cases = (
        ("llama", {}, "fp16", [], ["candle"]),
        ("llama", wider, "bf16", narrow, ["candle", "fused"]),
        ("gemma2", {"head_dim": 144}, "fp16", [], ["fused"]),
        ("gemma3", {}, "bf16", dora, ["candle", "fused"]),
        ("lfm2", wider, "bf16", [], ["fused"]),
        ("qwen3_5", wider, "bf16", [], ["fused"]),
        ("llama", blocks, "fp16", ["--lora", "r=4,alpha=8"], ["candle", "fused"]),
    )
    for family, sizes, dtype, more, choices in cases:
        name = f"{family}{' with wider heads' if sizes is wider else ''}{' with DoRA' if more is dora else ''}"
        name += " in blocks" if sizes is blocks else " with 8-bit moments" if more is narrow else ""
        with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as folder:
            size = [] if args.stand_in else ["--seq-len", 16]
            flags = ["--dtype", dtype, "--steps", FAMILY_STEPS, "--lr", 1e-3, *size, *more]
            source = ["--model", model, "--init", "random"]
            try:
                write_shape(model, {**family_config(family), **sizes, "vocab_size": 257})
                if sizes is blocks:
                    train("cpu", Path(folder) / "dense", *source, "--steps", 1, *size)
                    dense, source = next((Path(folder) / "dense").glob("*/step-*")), ["--model", Path(model) / "blocks.gguf"]
                    exported = run(args.finetune, "export", dense, source[1], "--dtype", "q4_k")
                    row(f"{name}, export", exported[0] == 0, last_line(*exported[1:]))
                flags += source
                cpu = train("cpu", Path(folder) / "cpu", *flags)["step"]
            except RuntimeError as error:
                row(name, False, error)
                continue
            for kernels in choices:
                what = f"{name}, {FAMILY_STEPS} steps of {dtype}, kernels {kernels}"
                # Heads of 64 elements, which have kernels for compute capability 9.0.
                capability = {"STAND_IN_CAPABILITY": "90"} if sizes is blocks else {}
                try:
                    gpu = train("cuda", Path(folder) / kernels, *flags, "--kernels", kernels, **capability)
                except RuntimeError as error:
                    row(what, False, error)
                    continue
                wgmma = WGMMA in kernels_of(Path(folder) / kernels)
                pairs = list(zip(gpu["step"], cpu))
                worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs)
                stayed = sizes is not blocks or any("stays quantized" in line for line in gpu["said"])
                figures = [f"losses within {worst:.1e} of the CPU's (allowed {TOLERANCE[dtype]:.0e})", *gpu["preflight"]]
                expected = kernels == "fused" and (HAS_WGMMA or bool(args.stand_in and capability))
                passed = stayed and wgmma == expected and len(pairs) == FAMILY_STEPS and worst < TOLERANCE[dtype]
                row(what, passed, "; ".join(figures))


def kernels_of(folder):
    """What a run's newest checkpoint says that it was computed with."""
    state = max(Path(folder).glob("*/step-*/state.json"))
    return json.loads(state.read_text())["schedule"]["kernels"]


HAS_WGMMA = not args.stand_in and "compute capability 9.0" in run(args.finetune, "doctor")[1]
WGMMA = "attention_wgmma,"
ALL_KERNELS = f"fused:adamw,attention,{WGMMA if HAS_WGMMA else ''}cross_entropy,elementwise,embedding,norm,product,rope,summary"


def own():
    """Our own kernels: used after their preflight, and found out where they are wrong, crash or hang."""
    everything = ALL_KERNELS.removeprefix("fused:").split(",")
    for dtype, tolerance in TOLERANCE.items():
        what = f"own kernels, {OWN_STEPS} steps of {dtype} as on the CPU"
        flags = flags_of(dtype, OWN_STEPS)
        with tempfile.TemporaryDirectory() as gpu_folder, tempfile.TemporaryDirectory() as cpu_folder:
            try:
                gpu, cpu = train("cuda", gpu_folder, *flags), train("cpu", cpu_folder, *flags)
            except RuntimeError as error:
                row(what, False, error)
                continue
            kernels = kernels_of(gpu_folder)
            if dtype == "fp16" and args.stand_in:
                other = [args.finetune, "--resume", next(Path(gpu_folder).glob("*/")), "--plain", "--checkpoint-dir", gpu_folder]
                code, _, err = run(*other, "--steps", OWN_STEPS + 1, STAND_IN_SKIPS="adamw")
                row("refused: to go on with other kernels", code == 2 and "resume with `--kernels fused`" in err, last_line(err))
        worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(gpu["step"], cpu["step"]))
        passed = len(gpu["step"]) == OWN_STEPS and worst < tolerance and kernels == ALL_KERNELS
        figures = [f"losses within {worst:.1e} (allowed {tolerance:.0e}), {kernels}", *gpu["preflight"]]
        row(what, passed, "; ".join(figures))
    if not args.stand_in:
        return
    faults = {"STAND_IN_SKIPS": "norm_backward", "STAND_IN_CRASHES": "attention_backward", "STAND_IN_HANGS": "summarize"}
    said = ["norm differs from the FP64 result", "attention crashed", "summary did not end within 60 s"]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--steps", 2, "--dtype", "bf16", "--kernels", "fused", "--set", "checkpoint.save_every=2"]
        code, out, err = run(*command("cuda", folder, *flags), **faults)
        kernels = kernels_of(folder) if code == 0 else last_line(err, out)
    notices = [line for line in (out + err).splitlines() if "preflight" in line]
    left = [name for name in everything if not any(why.startswith(name + " ") for why in said)]
    passed = code == 0 and len(notices) == 1 and all(why in notices[0] for why in said) and kernels == "fused:" + ",".join(left)
    row("kernels that are wrong, crash and hang", passed, notices[0] if notices else kernels)


def kill_and_resume(folder, flags, *resumed):
    """Kills a run of `OWN_STEPS` steps after its checkpoint at step 10 and resumes it; returns its events."""
    # A run may save its last checkpoint before it is killed.
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            words = [str(part) for part in command("cuda", folder, *flags)]
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
            while process.poll() is None and not list(Path(folder).glob("*/step-*10")):
                time.sleep(0.005)
            process.kill()
            process.wait()
            output.seek(0)
            said = output.read()
        if process.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"before it was killed: {cause(process.returncode, said, '')}")
        if not list(Path(folder).glob(f"*/step-*{OWN_STEPS}")):
            break
    else:
        raise RuntimeError("each of 10 runs ended before it was killed")
    resume = [args.finetune, "--resume", next(Path(folder).glob("*/")), "--plain", "--checkpoint-dir", folder]
    code, out, err = run(*resume, *resumed)
    if code != 0:
        before = preflight_notices(said)
        raise RuntimeError("; ".join([f"resumed: {cause(code, out, err)}", *[f"before: {line}" for line in before]]))
    return events(folder)


def difference(found, expected):
    """The first step whose figures differ between two runs, with the figures."""
    pairs = enumerate(itertools.zip_longest(found, expected), 1)
    return next((f"step {step}: {ours}, not {theirs}" for step, (ours, theirs) in pairs if ours != theirs), "files")


# Replays in a preflight: of four passes, one compiles and three replay.
PREFLIGHT_REPLAYS = 3


def graphs():
    """Passes that are recorded as CUDA graphs have the bits of other passes; wrong graphs are found out."""
    dropout = [f"dropout.{site}=0.1" for site in ("embedding", "attention", "residual")]
    dropout = [flag for pair in zip(["--set"] * 3, dropout) for flag in pair]
    llama, gemma3 = {**family_config("llama"), **LLAMA}, {**family_config("gemma3"), "hidden_size": 64, "head_dim": 32, "intermediate_size": 64}
    # The last number is 0 if the passes cannot be recorded.
    accumulated = [*dropout, "--grad-accum", 2]
    cases = (
        ("tiny", None, "fp16", [], 1),
        ("tiny with dropout and accumulation", None, "bf16", accumulated, 1),
        ("llama", llama, "fp16", [], 1),
        ("gemma3 with packed documents", gemma3, "bf16", ["--data", "SHORT", "--packing"], 1),
        ("llama with LoRA", llama, "bf16", ["--lora", "r=4,alpha=8"], 1),
        ("gemma3 with DoRA", gemma3, "bf16", ["--lora", "r=4,alpha=8,use_dora"], 0),
    )
    for name, shape, dtype, more, recorded in cases:
        what = f"{name}, {dtype}, recorded passes"
        with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as folder:
            flags = [*flags_of(dtype, OWN_STEPS), *more]
            try:
                if shape:
                    flags += [] if args.stand_in else ["--seq-len", 16]
                    write_shape(model, {**shape, "vocab_size": max(257, shape["vocab_size"])})
                    flags += ["--model", model, "--init", "random"]
                if "SHORT" in flags:
                    short = Path(model) / "short.jsonl"
                    short.write_text("".join(json.dumps({"text": "abcdefgh"[: 2 + row % 7]}) + "\n" for row in range(400)))
                    flags[flags.index("SHORT")] = short
                log = Path(folder) / "replays"
                log.touch()
                eager = train("cuda", f"{folder}/eager", *flags, "--kernels", "eager")
                found = train("cuda", f"{folder}/graph", *flags, STAND_IN_GRAPH_LOG=str(log))
                replays = len(log.read_text().splitlines()) - PREFLIGHT_REPLAYS
                bits = {kind: state(f"{folder}/{kind}", run) for kind, run in (("eager", eager), ("graph", found))}
                if more in ([], accumulated):
                    # Each continues the other.
                    for kind, first, then in (("to eager", "fused", "eager"), ("to graph", "eager", "fused")):
                        resumed = kill_and_resume(f"{folder}/{kind}", [*flags, "--kernels", first], "--kernels", then)
                        bits[kind] = state(f"{folder}/{kind}", resumed)
            except RuntimeError as error:
                row(what, False, error)
                continue
        others = other_bits(bits, "eager")
        passes = OWN_STEPS * (2 if "--grad-accum" in more else 1)
        counted = not args.stand_in or replays == (passes - 1) * recorded
        notices = [line for line in found["said"] if "without a CUDA graph" in line]
        passed = not others and counted and len(notices) == 1 - recorded
        overflows = f"; overflows at {skips(found)}" if dtype == "fp16" else ""
        passed &= dtype != "fp16" or 0 < len(skips(found)) < OWN_STEPS
        said = others or f"the bits of passes without graphs in {', '.join(list(bits)[1:])}"
        # Only the stand-in counts replays.
        said += f"; {replays} of {passes} passes replayed" if args.stand_in else ""
        row(what, passed, "; ".join([f"{said}{overflows}", *dict.fromkeys(notices + found["preflight"])]))
    if not args.stand_in:
        return
    faults = (
        ("wrong", "it differs from passes without one"), ("crash", "crashed"), ("hang", "did not end within 60 s"),
        ("refuse", "cannot be instantiated"),
    )
    for fault, why in faults:
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--steps", 2, "--dtype", "bf16", "--set", "checkpoint.save_every=2"]
            code, out, err = run(*command("cuda", folder, *flags), STAND_IN_GRAPH=fault)
            kernels = kernels_of(folder) if code == 0 else last_line(err, out)
        notices = [line for line in (out + err).splitlines() if "without a CUDA graph" in line]
        passed = code == 0 and len(notices) == 1 and why in notices[0] and kernels == ALL_KERNELS
        row(f"graphs with the fault `{fault}`", passed, notices[0] if notices else kernels)


def killed():
    """SIGKILL behind a checkpoint; the resumed run has the same bits as one that nobody killed."""
    for dtype, kernels, more in (("fp16", "candle", []), ("bf16", "fused", ["--optimizer", "adamw8bit"])):
        what = f"{dtype}, kernels {kernels}, killed and resumed"
        with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as folder:
            try:
                flags = [*flags_of(dtype, OWN_STEPS), "--kernels", kernels, *more]
                expected, found = train("cuda", whole, *flags), kill_and_resume(folder, flags)
            except RuntimeError as error:
                row(what, False, error)
                continue
        found, known = [[(step["loss"], step["loss_scale"]) for step in run["step"]] for run in (found, expected)]
        said = "the same bits" if found == known else f"OTHER bits, at {difference(found, known)}"
        row(what, found == known, "; ".join([f"{len(found)} steps with {said}", *expected["preflight"]]))


def processes():
    """Two and three processes have the same bits, one resumes what the other began, and one process alone is close."""
    mpirun = [ROOT / ".ci/mpirun", "-n"]
    for dtype, kernels in (("fp16", "candle"), ("bf16", "fused"))[: 1 if args.stand_in else 2]:
        what = f"{dtype}, kernels {kernels}, several processes"
        flags = [*flags_of(dtype, FAMILY_STEPS, save_every=4), "--grad-accum", 4, "--kernels", kernels]
        with tempfile.TemporaryDirectory() as folder:
            try:
                one = train("cuda", f"{folder}/1", *flags)
                found = {count: train("cuda", f"{folder}/{count}", *flags, launcher=[*mpirun, count]) for count in (2, 3)}
                # The checkpoint of step 4 by the other number of processes.
                checkpoint = next(Path(folder, "3").glob("*/step-*4"))
                code, out, err = run(*mpirun, 2, *command("cuda", f"{folder}/3", "--resume", checkpoint))
                if code != 0:
                    raise RuntimeError(f"resumed: {cause(code, out, err)}")
                found["3, then 2"] = events(f"{folder}/3")
            except RuntimeError as error:
                row(what, False, error)
                continue
        bits = {count: [(step["loss"], step["loss_scale"], step["grad_norm"]) for step in run["step"]] for count, run in found.items()}
        overflows = dtype != "fp16" or 0 < len(skips(found[2])) < FAMILY_STEPS
        others = [f"{count} at {difference(other, bits[2])}" for count, other in bits.items() if other != bits[2]]
        same = len(bits[2]) == FAMILY_STEPS and not others
        worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(found[2]["step"], one["step"]))
        figures = f"2, 3 and 3 resumed by 2: {'; '.join(['OTHER bits', *others]) if not same else 'the same bits'}; losses within {worst:.1e} of one process (allowed {TOLERANCE[dtype]:.0e})"
        row(what, same and overflows and worst < TOLERANCE[dtype], f"{figures}; overflows at {skips(found[2])}")


# Shapes with a matrix that several processes share the elements of.
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 2100}
LLAMA = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 2100}


def nccl():
    """Several processes with a GPU each, which exchange tensors through NCCL, have the bits of one process."""
    # Without the kernels whose preflight takes the longest, since each process has one.
    gpus = {"STAND_IN_GPUS": "4", "STAND_IN_CRASHES": "attention", "STAND_IN_SKIPS": "norm"}
    gpus["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    llama = {**family_config("llama"), **LLAMA}
    mpirun = [ROOT / ".ci/mpirun", "-n"]
    # The exchange's stream does its work as late, or as early, as events allow.
    orders = ["late", "early"] if args.stand_in else ["", ""]
    cases = (
        ("gpt2", GPT2, "fp16", [], [3, 4], None),
        ("llama", llama, "bf16", [], [2], None),
        ("llama with LoRA and MPI", llama, "fp16", ["--lora", "r=4,alpha=8"], [2], mpirun),
    )
    for name, shape, dtype, more, counts, mpirun in cases:
        with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as folder:
            flags = [*flags_of(dtype, 4, save_every=2), "--model", model, "--init", "random", "--grad-accum", 4, *more]
            try:
                write_shape(model, shape)
                found = {1: train("cuda", f"{folder}/1", *flags, **gpus)}
                for count, shard in itertools.product(counts, ("optimizer", "gradients")):
                    order = orders[(count + (shard == "gradients")) % 2]
                    launch = {"launcher": [*mpirun, count]} if mpirun else {}
                    started = [] if mpirun else ["--processes", count]
                    what = f"{count} {shard} {order}".strip()
                    launch |= {**gpus, "STAND_IN_STREAMS": order}
                    found[what] = train("cuda", f"{folder}/{what}", *flags, *started, "--shard", shard, **launch)
                bits = {what: state(f"{folder}/{what}", run) for what, run in found.items()}
                if 3 in counts:
                    first = Path(folder, f"3 optimizer {orders[1]}".strip())
                    resumed = train("cuda", first, "--resume", next(first.glob("*/step-*2")), "--processes", 2, **gpus)
                    bits["3, then 2"] = state(first, resumed)
                    if args.stand_in:
                        missing_waits(flags, gpus, bits[1])
            except RuntimeError as error:
                row(f"{name}, {dtype}, NCCL", False, error)
                continue
        others = other_bits(bits, 1)
        overflows = dtype != "fp16" or 0 < len(skips(found[1])) < 4
        said = others or f"the bits of one process in {', '.join(map(str, list(bits)[1:]))}"
        row(f"{name}, {dtype}, NCCL", not others and overflows and len(bits[1][0]) == 4, f"{said}; overflows at {skips(found[1])}")
    with tempfile.TemporaryDirectory() as folder:
        small = ["--set", "train.eval_batches=1", "--batch-size", 1, "--seq-len", 16]
        flags = ["--device", "cuda", "--dtype", "fp32", "--steps", 2, *small]
        code, out, err = run(args.finetune, "verify-distributed", *flags, **gpus, TMPDIR=folder)
        row("verify-distributed --device cuda", code == 0 and "bit-identical" in out, last_line(out, err))
    if args.stand_in:
        differing_kernels(gpus)
        lost_processes(gpus)
        lost_at_start(gpus)
        separate_gpus()
        without_nccl(gpus)


def exchange():
    """Two processes on one GPU have the bits of one, and the time that they exchange next to an all-reduce of the same bytes."""
    if args.stand_in:
        return print("skipped: the exchange's time, which only a GPU has", flush=True)
    shape = {"n_embd": 768, "n_layer": 6, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8", "NCCL_NVLS_ENABLE": "0"}
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as folder:
        try:
            write_shape(model, {**GPT2, **shape})
            size = ["--batch-size", 8, "--seq-len", 1024, "--grad-accum", 2]
            flags = [*flags_of("bf16", 52, save_every=52), "--model", model, "--init", "random", *size]
            one = train("cuda", f"{folder}/1", *flags)
            two = train("cuda", f"{folder}/2", *flags, "--processes", 2, **shared)
        except RuntimeError as error:
            return row("distilgpt2, bf16, two processes", False, error)
        same = state(f"{folder}/1", one) == state(f"{folder}/2", two)
        row("distilgpt2, bf16, two processes", same, f"{'the' if same else 'OTHER'} bits of one process")
    step = statistics.median(step["time"]["step_ms"] for step in two["step"][2:])
    waits = [step * process["comm_fraction"] for process in two["throughput"][-1]["processes"]]
    code, out, err = run(sys.executable, ROOT / "tests/python/nccl_rates.py", 2 * 81_912_576, **shared)
    figures = f"{step:.1f} ms a step, in it {max(waits):.1f} ms of waits; NCCL alone: {last_line(out, err)} ms"
    row("exchange against an all-reduce", code == 0, figures)


def missing_waits(flags, gpus, expected):
    """The runs above would notice if a stream or the program did not wait for the other stream."""
    for call, order in (("cuStreamWaitEvent", "early"), ("cuEventQuery", "late")):
        with tempfile.TemporaryDirectory() as folder:
            try:
                run = train("cuda", folder, *flags, "--processes", 2, **gpus, STAND_IN_IGNORES=call, STAND_IN_STREAMS=order)
                noticed, said = state(folder, run) != expected, "other bits"
            except RuntimeError as error:
                noticed, said = True, str(error)
            row(f"noticed: no wait in {call}", noticed, said if noticed else "the same bits")


def launch_two(words, first, second):
    """Runs a command in two processes with these variables, as a launcher would."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda more: run(*words, **job, **more), ({**first, "RANK": "0"}, {**second, "RANK": "1"})))


def differing_kernels(gpus):
    """Kernels that fail the preflight of one process are used by none."""
    with tempfile.TemporaryDirectory() as folder:
        words, gpus = command("cuda", folder, *flags_of("bf16", 2), "--kernels", "fused", "--grad-accum", 2), {**gpus, "TMPDIR": folder}
        ended = launch_two(words, gpus, {**gpus, "STAND_IN_SKIPS": "adamw"})
        kernels = kernels_of(folder) if ended[0][0] == 0 else last_line(*ended[0][1:])
        notices = [line for line in ended[0][2].splitlines() if "restricted by process 1 on " in line]
    left = ["cross_entropy", "elementwise", "embedding", "product", "rope", "summary"]
    passed = kernels == "fused:" + ",".join(left) and ended[1][0] == 0 and len(notices) == 1 and "adamw differs" in notices[0]
    row("kernels that fail in one of two processes", passed, f"{kernels}; {last_line(*notices)}")


def state(folder, run):
    """A run's figures, and the bytes of its newest checkpoint's tensors."""
    newest = max(Path(folder).glob("*/step-*"))
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(newest.glob("*.safetensors"))}
    return [(step["loss"], step["loss_scale"], step["grad_norm"]) for step in run["step"]], files


def other_bits(states, reference):
    """The states that differ from the reference, with their first difference; empty if none does."""
    differ = [kind for kind, found in states.items() if found != states[reference]]
    return "; ".join(f"OTHER bits in {kind}, at {difference(states[kind][0], states[reference][0])}" for kind in differ)


def ranks_of(leader):
    """The processes that the leader has started, by rank."""
    found = {0: leader.pid}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            rank = [word for word in (folder / "environ").read_bytes().split(b"\0") if word.startswith(b"RANK=")]
        except (OSError, IndexError):
            continue
        if parent == leader.pid and rank:
            found[int(rank[0][5:])] = int(folder.name)
    return found


def lost_processes(gpus):
    """SIGKILL of each process: all others end, and the leader says why if it still runs."""
    for victim in range(3):
        with tempfile.TemporaryDirectory() as folder:
            flags = [*flags_of("fp16", 1000), "--kernels", "fused", "--grad-accum", 3, "--gpus", 3]
            job = subprocess.Popen(
                [str(part) for part in command("cuda", folder, *flags)], env={**environment, **gpus, "TMPDIR": folder},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            while job.poll() is None and not any(b'"step":2' in file.read_bytes() for file in Path(folder).glob("*/events.jsonl")):
                time.sleep(0.05)
            ranks = ranks_of(job)
            os.kill(ranks.get(victim, job.pid), signal.SIGKILL)
            began = time.monotonic()
            try:
                _, said = job.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                job.kill()
                said = "did not end"
            seconds = time.monotonic() - began
            while (left := [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]) and time.monotonic() - began < 20:
                time.sleep(0.05)
            expected = "" if victim == 0 else f"process {victim}"
            passed = len(ranks) == 3 and job.returncode != 0 and seconds < 10 and not left and expected in said
            row(f"SIGKILL of process {victim} of 3", passed, f"all ended after {seconds:.1f} s; {last_line(said) if passed else said}")


def separate_gpus():
    """Each of two processes has all memory of its GPU, although a launcher shows it no other."""
    with tempfile.TemporaryDirectory() as folder:
        words = [args.finetune, "--device", "cuda", "--kernels", "candle", "--plain", "--checkpoint-dir", folder]
        words += ["--batch-size", 10**6, "--grad-accum", 2]
        alone = run(*words)[2]
        _, _, said = launch_two(words, {"STAND_IN_UUID": "1"}, {"STAND_IN_UUID": "2"})[0]
        _, _, shared = launch_two(words, {}, {})[0]
    available = [last_line(text).partition("but only ")[2].partition(" are available")[0] for text in (alone, said, shared)]
    passed = len(set(available)) == 2 and available[0] == available[1] != ""
    row("the memory of separate GPUs", passed, f"{available[0]} in one process, {available[1]} in each of two, {available[2]} on one GPU")


def lost_at_start(gpus):
    """A process that ends before NCCL has connected it, or in its first group: all others end."""
    for variable in ("STAND_IN_LEAVES", "STAND_IN_LEAVES_GROUP"):
        with tempfile.TemporaryDirectory() as folder:
            words = command("cuda", folder, *flags_of("fp16", 2), "--kernels", "fused", "--grad-accum", 3, "--gpus", 3)
            more = {**gpus, "TMPDIR": folder, variable: "1"}
            try:
                done = subprocess.run(
                    [str(word) for word in words], env={**environment, **more}, capture_output=True, text=True, timeout=120
                )
                passed = done.returncode == 1 and "process 1 ended with exit status: 7" in done.stderr
                said = last_line(done.stderr) if passed else done.stderr
            except subprocess.TimeoutExpired:
                passed, said = False, "did not end"
            row(f"a process that ends before NCCL connects it: {variable}", passed, said)


def without_nccl(gpus):
    """A program for one GPU starts without NCCL, and several processes say what is missing, or use host memory."""
    with tempfile.TemporaryDirectory() as libraries:
        for library in args.stand_in.resolve().glob("lib*.so.*"):
            if "nccl" not in library.name:
                (Path(libraries) / library.name).symlink_to(library)
        missing = {**gpus, "LD_LIBRARY_PATH": ":".join([libraries, *path[1:]])}
        cases = [
            ("refused: NCCL is missing", ["--gpus", 2], missing, 2, "libnccl.so.2: cannot open shared object file"),
            ("refused: NCCL is too old", ["--gpus", 2], {**gpus, "STAND_IN_NCCL": "21703"}, 2, "libnccl.so.2 is version 2.17"),
            ("one process without NCCL", [], missing, 0, ""),
            ("candle's kernels without NCCL", ["--gpus", 2, "--kernels", "candle"], missing, 0, ""),
            ("a send that NCCL refuses", ["--gpus", 2], {**gpus, "STAND_IN_REFUSES_SENDS": "1"}, 1, "NCCL: an error of the stand-in"),
        ]
        for what, flags, more, expected, text in cases:
            with tempfile.TemporaryDirectory() as folder:
                code, out, err = run(*command("cuda", folder, "--steps", 1, *flags), **more)
            errors = [line for line in err.splitlines() if line.startswith("error:")]
            passed = code == expected and text in "".join(errors) and len(errors) == (code > 0) and "CUDA stand-in" not in err
            row(what, passed, last_line(err, out) if passed else f"exit code {code}: {err}")


def commands():
    """What `generate`, `chat`, `eval` and `fp16-check` say of one trained model, on the GPU and on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            train("cpu", folder, "--dtype", "fp16", "--steps", 10, "--run", "r")
        except RuntimeError as error:
            return row("a model to use", False, error)
        size = ["--batch-size", 2, "--seq-len", 16]
        # On the stand-in the whole of it takes minutes.
        text = Path(folder) / "text.txt"
        text.write_text((ROOT / "README.md").read_text()[:2000])

        def both(what, *flags, typed=None):
            """Runs a command on both devices; its outputs, or nothing where it fails."""
            found = []
            for device in ("cuda", "cpu"):
                code, out, err = run(args.finetune, *flags, "--checkpoint-dir", folder, "--device", device, typed=typed)
                if code != 0:
                    row(what, False, f"{device}: exit code {code}: {last_line(err, out)}")
                    return None
                found.append(out)
            return found

        for dtype in TOLERANCE:
            # What a half type rounds otherwise may turn a draw, and seldom the likeliest token.
            temperature = 1 if dtype == "fp32" else 0
            said = both(f"generate, {dtype}", "generate", "r", "-p", "the ", "-n", 12, "--temperature", temperature, "--dtype", dtype)
            if said:
                row(f"generate, {dtype}", said[0] == said[1], repr(said[0][:50]))
            found = both(f"eval, {dtype}", "eval", "r", "--data", text, "--json", "--dtype", dtype, *size)
            if found:
                losses = [json.loads(one)["loss"] for one in found]
                error = abs(losses[0] - losses[1]) / losses[1]
                row(f"eval, {dtype}", error < TOLERANCE[dtype], f"loss {losses[0]:.6f}, within {error:.1e} of the CPU's")
        answers = both("chat", "chat", "r", "-n", 8, "--temperature", 0, typed="hello\nagain\n")
        if answers:
            row("chat", answers[0] == answers[1] and len(answers[0]) > 2, repr(answers[0][:50]))
        found = both("fp16-check", "fp16-check", "r", "--data", text, "--json", "--batches", 1, *size)
        if found:
            reports = [json.loads(one) for one in found]
            same = [(report["verdict"], report["best_scale"]) for report in reports]
            row("fp16-check", same[0] == same[1], f"{same[0][0]}, best scale 2^{math.log2(same[0][1]):.0f}")


def refused():
    _, said, _ = run(args.finetune, "doctor")
    gpu = next((line for line in said.splitlines() if line.startswith("GPU")), "nothing")
    row("doctor names the GPU", "compute capability" in gpu, gpu.removeprefix("GPU").strip())
    cases = [
        ("a GPU that is not there", ["--device", "cuda:7"], {}, "this GPU does not exist"),
        ("BF16 on compute capability 7.5", ["--device", "cuda", "--dtype", "bf16"], {"STAND_IN_CAPABILITY": "75"}, "BF16 needs 8.0"),
        ("a driver that is too old", ["--device", "cuda"], {"STAND_IN_DRIVER": "12080"}, "the driver supports CUDA 12.8"),
        ("no GPU at all", ["--device", "cuda"], {"STAND_IN_WITHOUT_GPU": "1"}, "no CUDA-capable device"),
    ]
    for what, flags, more, said in cases:
        if more and not args.stand_in:
            continue
        with tempfile.TemporaryDirectory() as folder:
            code, _, err = run(args.finetune, *flags, "--plain", "--steps", 1, "--checkpoint-dir", folder, **more)
        row(f"refused: {what}", code == 2 and said in err and err.strip().count("\n") == 0, err.strip())


def bench():
    """Rates, and the first loss with our own kernels against candle's; a step that is skipped trains nothing."""
    for model, shape in [("tiny", "2x16")] if args.stand_in else BENCHES:
        batch, seq = shape.split("x")
        for dtype, tolerance in TOLERANCE.items():
            what, found = f"bench {model}, {shape}, {dtype}", {}
            for kernels in ("candle", "fused"):
                flags = ["bench", "--model", model, "--device", "cuda", "--kernels", kernels, "--dtype", dtype]
                small = ["--steps", 2, "--warmup", 1] if args.stand_in else []
                code, out, err = run(args.finetune, *flags, *small, "--batch-size", batch, "--seq-len", seq)
                if code != 0:
                    row(what, False, f"kernels {kernels}: {last_line(err)}")
                    break
                found[kernels] = json.loads(out)
            else:
                candle, own = found["candle"], found["fused"]
                error = abs(own["loss_first"] - candle["loss_first"]) / candle["loss_first"]
                skipped = candle["skipped"] + own["skipped"]
                rates = "" if args.stand_in else f"; {candle['tokens_per_s']} tokens/s with candle's kernels, {own['tokens_per_s']} with {own['kernels']}"
                passed = error < tolerance and skipped == 0 and own["kernels"].startswith("fused:")
                row(what, passed, f"first losses within {error:.1e} (allowed {tolerance:.0e}), {skipped} steps skipped{rates}")


# Peers that compile at once: model, shape, batches in a step, rank of LoRA, flags of the peer, the ratio to reach.
PEERS = [
    [
        ("distilgpt2", "8x1024", 1, None, ["--compile", "--pad-vocab"], 1.2),
        ("distilgpt2", "32x32", 1, None, ["--compile", "--pad-vocab"], 2.0),
        ("distilgpt2", "32x32", 1, None, ["--pad-vocab"], 3.0),
        ("smollm2-135m", "8x512", 1, None, ["--compile"], 1.5),
    ],
    [(model, "8x1024", 4, None, ["--compile"], 1.3) for model in ("qwen2.5-0.5b", "gemma3-270m")],
    [(model, "8x1024", 4, None, ["--compile"], 1.3) for model in ("qwen3-0.6b", "llama3.2-1b")],
    [(model, "8x1024", 4, 16, ["--compile"], 1.5) for model in ("qwen2.5-0.5b", "qwen3-0.6b", "llama3.2-1b", "gemma3-270m")],
]
ROUNDS = 3


def ratios():
    """The speed of `finetune bench` in BF16 and PyTorch's, measured in turn. A row fails if a program does, not by its ratio."""
    if args.stand_in:
        return print("skipped: ratios to PyTorch, which needs a GPU", flush=True)
    for wave in [PEERS[int(index)] for index in args.waves.split(",")]:
        measured = []
        for model, shape, accumulated, rank, flags, aim in wave:
            batch, seq = shape.split("x")
            flags = ["--device", "cuda", "--dtype", "bf16_amp", "--warmup", 5, "--steps", 10, "--rounds", ROUNDS, *flags]
            size = ["--model", model, "--grad-accum", accumulated, *(["--lora", rank] if rank else [])]
            words = [sys.executable, ROOT / "benches/torch_step.py", *size, "--batch", batch, "--seq", seq, *flags]
            peer = subprocess.Popen([str(word) for word in words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ours = [args.finetune, "bench", *size, "--batch-size", batch, "--seq-len", seq, "--device", "cuda", "--dtype", "bf16", "--steps", 15]
            measured.append((f"{model}, {shape}{' LoRA' if rank else ''}{'' if '--compile' in flags else ', not compiled'}", peer, ours, aim))
        # Each has compiled when it is ready; one that ends prints nothing.
        ready = [peer.stdout.readline() for _, peer, _, _ in measured]
        for (what, peer, ours, aim), first in zip(measured, ready):
            rounds = []
            for _ in range(ROUNDS if first else 0):
                code, out, err = run(*ours)
                print("go", file=peer.stdin, flush=True)
                theirs = peer.stdout.readline()
                peer.stdout.readline()
                if code != 0 or not theirs:
                    row(what, False, last_line(err, "the peer ended"))
                    break
                rounds.append((json.loads(out), json.loads(theirs)))
            peer.stdin.close()
            peer.wait()
            if not rounds:
                row(what, False, "the peer did not start")
                continue
            rates = [(a["tokens_per_s"], b["tokens_per_s"]) for a, b in rounds]
            found = sorted(a / b for a, b in rates)
            medians = [statistics.median(rate) for rate in zip(*rates)]
            mib = [rounds[-1][0]["peak_device_mib"], rounds[-1][1]["peak_device_mib"]]
            figures = f"{rounds[-1][0]['gflops'] / 1e3:.0f} TFLOP/s; {medians[0]:,.0f} and {medians[1]:,.0f} tokens/s, ratio {statistics.median(found):.2f} ({found[0]:.2f}–{found[-1]:.2f}), aim {aim}"
            row(what, True, f"{figures}; {mib[0]} and {mib[1]} MiB")


def operations():
    if args.tests is None:
        return row("candle's operations", False, "name the test program with --tests")
    code, out, err = run(args.tests, "--test-threads=1")
    summary = next((line for line in out.splitlines() if line.startswith("test result")), last_line(err))
    row("candle's operations", code == 0, summary)


parts = {
    "operations": operations, "runs": runs, "families": families, "own": own, "killed": killed, "processes": processes,
    "nccl": nccl, "exchange": exchange, "graphs": graphs, "ratios": ratios,
    "commands": commands, "refused": refused, "bench": bench,
}
# The stand-in computes on one core.
with concurrent.futures.ThreadPoolExecutor(os.cpu_count() if args.stand_in else 1) as pool:
    for part in [pool.submit(parts[name]) for name in args.only.split(",")]:
        part.result()
sys.exit(failed)
