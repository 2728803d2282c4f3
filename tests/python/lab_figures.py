"""Compares the laboratory's figures with numpy, PyTorch, ml_dtypes and torchao.

Usage: lab_figures.py REPORTS.json. Reports are what `finetune lab VIEW --json` printed, by name. Prints a JSON object
of lists of disagreements by name; empty lists where everything agrees.
"""

import json
import sys

import ml_dtypes
import numpy as np
import torch
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

reports = json.load(open(sys.argv[1]))


def number(x):
    return float(x) if isinstance(x, str) else x


def same(a, b):
    return a == b or (np.isnan(a) and np.isnan(b))


TYPES = {
    "FP32": np.float32,
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "FP8 E4M3": ml_dtypes.float8_e4m3fn,
    "FP8 E5M2": ml_dtypes.float8_e5m2,
}


def bits(report):
    wrong = []
    value = number(report["value"])
    for row in report["formats"]:
        dtype = TYPES[row["format"]]
        with np.errstate(all="ignore"):
            stored = np.float64(value).astype(dtype)
        pattern = int(stored.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[stored.dtype.itemsize]))
        if not same(float(stored), number(row["value"])):
            wrong.append([row["format"], float(stored), row["value"]])
        elif not np.isnan(float(stored)) and pattern != int(row["pattern"], 16):
            wrong.append([row["format"], hex(pattern), row["pattern"]])
        if row["format"] == "FP8 E4M3" and "saturated" in row:
            cast = float(torch.tensor(value, dtype=torch.float32).to(torch.float8_e4m3fn))
            if cast != row["saturated"]:
                wrong.append(["saturated", cast, row["saturated"]])
    return wrong


def ulp(report):
    wrong = []
    for row in report["formats"]:
        if row["verdict"] == "out_of_range":
            continue
        dtype = TYPES[row["format"]]
        with np.errstate(all="ignore"):
            stored = np.float64(number(report["center"])).astype(dtype)
            total = (np.float64(float(stored)) + number(report["update"])).astype(dtype)
        survives = bool(np.isfinite(float(total)) and float(total) != float(stored))
        if survives != row["survives"] or not same(float(total), number(row["sum"])):
            wrong.append([row["format"], float(total), row["sum"], survives])
    return wrong


def sums(report):
    """Every deterministic accumulator at every length, with the library's own arithmetic in the format."""
    wrong = []
    index = np.arange(1, report["lengths"][-1] + 1, dtype=np.float64)

    def terms(factor):
        if report["terms"] == "tenths":
            return np.full(len(index), 0.1)
        values = np.fmod(index * factor, 1.0)
        return values - 0.5 if report["terms"] == "signed" else values

    left = terms(0.6180339887498949)
    right = terms(np.sqrt(2.0)) if report["dot"] else np.ones(len(index))

    def pairwise(values, dtype):
        if len(values) == 1:
            return values[0]
        half = len(values) // 2
        return dtype(pairwise(values[:half], dtype) + pairwise(values[half:], dtype))

    for row in report["rows"]:
        dtype = TYPES[row["format"]]
        exact = left.astype(dtype).astype(np.float64) * right.astype(dtype).astype(np.float64)
        products = exact.astype(dtype)
        for length, ours in zip(report["lengths"], row["results"]):
            if length > 5000:
                continue
            values = products[:length]
            if row["algorithm"] == "one_by_one":
                total = dtype(0)
                for value in values:
                    total = dtype(total + value)
            elif row["algorithm"] == "kahan":
                total, lost = dtype(0), dtype(0)
                for value in values:
                    corrected = dtype(value - lost)
                    following = dtype(total + corrected)
                    lost = dtype(dtype(following - total) - corrected)
                    total = following
            elif row["algorithm"] == "pairwise":
                total = pairwise(values, dtype)
            elif row["algorithm"] == "tensor_core":
                total = np.float32(0)
                for value in exact[:length].astype(np.float32):
                    total = np.float32(total + value)
                total = total.astype(dtype)
            else:
                continue
            if not same(float(total), number(ours)):
                wrong.append([row["format"], row["algorithm"], length, float(total), ours])
    return wrong


def softmax(report):
    wrong = []
    for row in report["formats"]:
        if row["format"] == "BF16":
            continue  # numpy's bfloat16 has no exp of its own.
        dtype = TYPES[row["format"]]
        with np.errstate(all="ignore"):
            numbers = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16) if dtype is np.float16 else None
            if numbers is not None:
                finite = numbers[np.isfinite(np.exp(numbers.astype(np.float64)).astype(dtype))]
                kept = numbers[np.exp(-numbers.astype(np.float64)).astype(dtype) > 0]
                if float(finite.max()) != row["exp_until"] or -float(kept.max()) != row["exp_from"]:
                    wrong.append([row["format"], float(finite.max()), -float(kept.max())])
        stored = dtype(number(report["position"]))
        sine = float(dtype(np.sin(np.float64(stored))))
        if not same(float(stored), number(row["position"])) or abs(sine - number(row["sine"])) > 0:
            wrong.append([row["format"], float(stored), sine])
    return wrong


def scaler(report):
    """An independent simulation of the closed loop: 100 seeds of numpy's normal numbers."""
    wrong = []
    for trajectory, ours in zip(report["trajectories"], report["over_seeds"]):
        interval = trajectory["config"]["growth_interval"]
        counts, means = [], []
        for seed in range(100):
            largest = 2.0 ** np.random.default_rng(seed).normal(-1, 1, report["steps"])
            scale, clean, count, log2 = trajectory["config"]["init_scale"], 0, 0, []
            for value in largest:
                log2.append(np.log2(scale))
                if scale * value > 65504:
                    scale, clean, count = scale / 2, 0, count + 1
                else:
                    clean += 1
                    if clean == interval:
                        scale, clean = scale * 2, 0
            counts.append(count)
            means.append(np.mean(log2))
        for theirs, mean in zip([counts, means], ours):
            error = 1.96 * np.std(theirs, ddof=1) / 10
            if abs(np.mean(theirs) - mean["mean"]) > 1.5 * (error + mean["half_width"]):
                wrong.append([interval, np.mean(theirs), mean])
    return wrong


def blocks(report):
    """Scales and codes, bit for bit: PyTorch's casts, torchao's MXFP8 and NVFP4."""
    wrong = []
    x = torch.tensor(report["tensor"], dtype=torch.float32).reshape(report["shape"])
    e4m3 = torch.float8_e4m3fn
    for scheme in report["schemes"]:
        name, block = scheme["scheme"], scheme["block"]
        codes = torch.tensor(scheme["codes"], dtype=torch.uint8)
        scales = torch.tensor(scheme["scales"], dtype=torch.float32)
        parts = x.reshape(-1, block)
        amax = parts.abs().amax(1, keepdim=True)
        if name.startswith("fp8"):
            if name == "fp8_delayed":
                amax = torch.full_like(amax, report["stale_amax"])
            # A number over a tensor would be its reciprocal times the number.
            factor = torch.full_like(amax, 448.0) / amax
            theirs = (parts * factor).to(e4m3).view(torch.uint8)
            their_scales = 1.0 / factor
        elif name == "int8":
            their_scales = amax / 127.0
            theirs = torch.round(parts / their_scales).clamp(-127, 127).to(torch.int8).view(torch.uint8)
        elif name == "mxfp8":
            scale, data = to_mx(x, e4m3, 32)
            their_scales = scale.float()
            theirs = data.view(torch.uint8)
        else:
            tensor_scale = (x.abs().amax() / (448.0 * 6.0)).float()
            if float(tensor_scale) != np.float32(scheme["tensor_scale"]):
                wrong.append([name, float(tensor_scale), scheme["tensor_scale"]])
            scale, packed = nvfp4_quantize(x, 16, tensor_scale)
            their_scales = scale.float()
            theirs = torch.stack([packed & 15, packed >> 4], -1)
        if not torch.equal(their_scales.reshape(-1), scales):
            wrong.append([name, "scales", their_scales.reshape(-1)[:3].tolist(), scales[:3].tolist()])
        if not torch.equal(theirs.reshape(-1), codes):
            at = int((theirs.reshape(-1) != codes).nonzero()[0])
            wrong.append([name, "code", at, int(theirs.reshape(-1)[at]), int(codes[at])])
    return wrong


VIEWS = {"bits": bits, "ulp": ulp, "sums": sums, "softmax": softmax, "scaler": scaler, "blocks": blocks}
answer = {name: VIEWS[name.split()[0]](report) for name, report in reports.items()}
print(json.dumps(answer))
