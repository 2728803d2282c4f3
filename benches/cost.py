#!/usr/bin/env python3
"""Measures tokens per second and peak memory for 32 to 16,384 tokens per step, and by sequence length.

    benches/cost.py --finetune target/release/finetune --dtypes bf16,fp32 --svg docs/pictures/cost.svg

Prints a Markdown table: tokens per second (median step of `finetune bench`), share of the machine's peak, and peak
memory with the prediction of `finetune lab memory`. `--svg` draws the speed of the rows of 128 tokens. With
`--from FILE`, an earlier `--json FILE`, it only draws and prints.
"""

import argparse
import json
import math
import subprocess

RECIPES = {"fp32": "fp32", "bf16": "bf16_amp", "fp16": "fp16_amp"}
# A step of rows of 128 tokens from 32 to 16,384, then 2,048 tokens in rows of other lengths.
BY_TOKENS = ["1x32", "1x128", "2x128", "4x128", "8x128", "16x128", "32x128", "64x128", "128x128"]
BY_LENGTH = ["64x32", "32x64", "8x256", "4x512", "2x1024"]
LONG = ["16x128", "8x256", "2x1024", "1x2048", "1x4096", "1x8192"]


def measure(a, model, shape, dtype):
    batch, seq = map(int, shape.split("x"))
    steps = max(1, min(a.steps, 4096 // (batch * seq)))
    run = lambda *command: json.loads(subprocess.run([a.finetune, *command], capture_output=True, text=True, check=True).stdout)
    sizes = ["--model", model, "--batch-size", str(batch), "--seq-len", str(seq), "--dtype", dtype, "--threads", str(a.threads)]
    report = run("bench", *sizes, "--steps", str(steps), "--warmup", "1", "--device", "cpu")
    plans = run("lab", "memory", "--model", model, "--batch", str(batch), "--seq", str(seq), "--json")["plans"]
    plan = next(plan for plan in plans if plan["recipe"] == RECIPES[dtype])
    predicted = sum(group["bytes"] for group in plan["engine"]) / 2**20
    keys = ("tokens_per_s", "share_of_peak", "peak_rss_mib", "step_ms")
    return {"model": model, "shape": shape, "dtype": dtype, "predicted_mib": predicted, **{key: report[key] for key in keys}}


def table(rows):
    print("| model | type | shape | tokens a step | tokens/s | share of peak | MiB, measured and predicted |\n|---|---|---|---|---|---|---|")
    for row in rows:
        batch, seq = map(int, row["shape"].split("x"))
        memory = f"{row['peak_rss_mib']:,.0f}, {row['predicted_mib']:,.0f} ({row['peak_rss_mib'] / row['predicted_mib'] - 1:+.0%})"
        print(
            f"| {row['model']} | {row['dtype'].upper()} | {batch} × {seq} | {batch * seq:,} | {row['tokens_per_s']:,.0f} "
            f"| {row['share_of_peak']:.0%} | {memory} |"
        )


def picture(rows, path):
    """Speed against tokens a step, one line a model and type, both axes logarithmic."""
    width, height, left, right, top, bottom = 720, 400, 70, 200, 30, 50
    lines = {}
    for row in rows:
        batch, seq = map(int, row["shape"].split("x"))
        if row["shape"] in BY_TOKENS:
            lines.setdefault(f"{row['model']} {row['dtype'].upper()}", []).append((batch * seq, row["tokens_per_s"]))
    speeds = [speed for points in lines.values() for _, speed in points]
    low, high = math.floor(math.log10(min(speeds))), math.ceil(math.log10(max(speeds)))
    x = lambda tokens: left + (math.log2(tokens) - 5) / 9 * (width - left - right)
    y = lambda speed: height - bottom - (math.log10(speed) - low) / (high - low) * (height - top - bottom)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/><text x="{left}" y="18">tokens a second by tokens a step</text>',
    ]
    for power in range(5, 15):
        at = x(2**power)
        parts.append(f'<path d="M{at:.1f} {top}V{height - bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - bottom + 18}" text-anchor="middle">{2**power:,}</text>')
    for speed in (factor * 10**power for power in range(low, high + 1) for factor in (1, 2, 5)):
        if 10**low <= speed <= 10**high:
            parts.append(f'<path d="M{left} {y(speed):.1f}H{width - right}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y(speed) + 4:.1f}" text-anchor="end">{speed:,}</text>')
    for (name, points), color in zip(lines.items(), ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")):
        path_of = " ".join(f"{x(tokens):.1f},{y(speed):.1f}" for tokens, speed in points)
        parts.append(f'<polyline points="{path_of}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(t):.1f}" cy="{y(s):.1f}" r="3" fill="{color}"/>' for t, s in points]
        parts.append(f'<text x="{x(points[-1][0]) + 8:.1f}" y="{y(points[-1][1]) + 4:.1f}" fill="{color}">{name}</text>')
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join([*parts, "</svg>\n"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetune", default="target/release/finetune", help="our program")
    parser.add_argument("--dtypes", default="bf16,fp32", help="separated by commas")
    parser.add_argument("--models", default="tiny,distilgpt2,smollm2-135m", help="separated by commas; Llamas get long rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of small shapes; large ones have fewer")
    parser.add_argument("--json", help="append every row to this file, one object a line")
    parser.add_argument("--from", dest="source", help="take the rows from this file, and measure nothing")
    parser.add_argument("--svg", help="draw to this file")
    a = parser.parse_args()
    rows = [json.loads(line) for line in open(a.source, encoding="utf-8")] if a.source else []
    for model in a.models.split(",") if not a.source else ():
        shapes = {"tiny": BY_TOKENS, "distilgpt2": BY_TOKENS + BY_LENGTH}.get(model, ["1x32", "1x128", "4x128"] + LONG)
        for dtype in a.dtypes.split(","):
            for shape in shapes:
                rows.append(measure(a, model, shape, dtype))
                if a.json:
                    with open(a.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    table(rows)
    if a.svg:
        picture(rows, a.svg)


main()
