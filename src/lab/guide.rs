//! The lab's guide: each view's scenarios, keys and explanation.

use clap::Command;
use ratatui::crossterm::event::KeyCode;

use super::screen::{Adjust, Field, Instrument, Scenario, ViewKey};
use super::{Bits, parse_format};

const fn scenario(name: &'static str, set: &'static [(&'static str, &'static str)], text: &'static str) -> Scenario {
    Scenario { name, set, text }
}

const fn key(
    code: KeyCode,
    written: &'static str,
    footer: &'static str,
    help: &'static str,
    act: fn(&mut Instrument),
) -> ViewKey {
    ViewKey { code, written, footer, help, act }
}

/// The explanation of a view.
pub fn about(view: &str) -> &'static str {
    match view {
        "bits" => {
            "A floating-point number is a sign, an exponent and a mantissa. The exponent chooses the binade, from one power of \
             two to the next; the mantissa cuts it into equal steps, the ULP. A format with more exponent bits reaches \
             further, one with more mantissa bits is finer."
        }
        "ranges" => {
            "Each bar shows what a format can represent. Subnormal numbers, below the smallest normal one, have fewer significant \
             bits the smaller they are. What is smaller still becomes zero; what is larger than the largest number becomes \
             infinity or NaN. BF16 has FP32's range with fewer digits. FP16 has more digits, but gradients can leave its range."
        }
        "ulp" => {
            "A weight moves only if the update exceeds half the distance to the next number of its format. A master weight in \
             FP32 takes every update; the working copy moves once enough of them have added up. Without one, an update smaller \
             than half the spacing is lost at every step."
        }
        "scaler" => {
            "A step overflows if scale × max|g| exceeds 65504. The scaler then skips the step and halves the scale; after \
             growth_interval clean steps it doubles the scale again. The scale therefore moves as a sawtooth below its ceiling. A \
             short interval keeps it near the ceiling and loses more steps; a long one loses fewer and keeps it lower."
        }
        "scaling" => {
            "The loss scale multiplies every gradient by 2^S, which shifts the histogram to the right and keeps its shape. \
             Gradients left of the format's window become zero, those in its subnormal part lose digits, and those right of it \
             become infinite, which costs the step. The best scale keeps the most gradients in full precision without overflow."
        }
        "memory" => {
            "Training holds the weights, a gradient for each, Adam's two moments and, in mixed precision, FP32 masters: 16 bytes \
             a parameter either way. Half precision shrinks the activations, which grow with batch and sequence. Rows marked \
             `ours` show this program's buffers, the others the textbook's formula."
        }
        "sums" => {
            "A narrow accumulator stops growing once a term is smaller than half its ULP. Pairwise summation adds numbers of \
             similar size, Kahan's method carries the lost part along, and stochastic rounding is right on average. A tensor core \
             sums in FP32 and rounds once, as does every product in this program."
        }
        "blocks" => {
            "A format with few bits needs a scale that maps the largest value (amax) to the format's largest number. The more \
             values share a scale, the more an outlier costs them; smaller blocks need more scales. Delayed scaling takes the \
             scale from earlier steps and clips values that have grown since."
        }
        "softmax" => {
            "FP16's exp is infinite above 11.09 and zero below -17.33. Subtracting the largest logit prevents the overflow; a sum \
             in FP32 prevents the rest. FP16 cannot represent every whole number beyond 2048, nor BF16 beyond 256, so later \
             positions get the sine of another token: compute angles in FP32."
        }
        "crises" => {
            "FP16 fails in three ways, and mixed precision combines three remedies: a loss scale against underflow, skipping the \
             step and backing off against overflow, and FP32 master weights against vanishing updates. BF16 has FP32's range and \
             needs only the last one."
        }
        "casts" => {
            "A policy does not mean `everything in FP16`: products take narrow operands, while sums and nonlinear functions stay \
             wide inside. `rounded once` is measured: the share of an operation's results that equal the exact ones, rounded \
             to the operands' type; a sum in half precision would miss most of them. The second list has the types in which a \
             forward and a backward pass of this engine store their tensors."
        }
        _ => "",
    }
}

const BITS: &[Scenario] = &[
    scenario(
        "lost gradient",
        &[("value", "1e-8")],
        "A typical small gradient. FP16 stores zero, BF16 does not. Press n in FP16 to see where its numbers begin.",
    ),
    scenario(
        "edge of FP16",
        &[("value", "65504"), ("cursor", "15")],
        "FP16's largest number. Press n once: infinity. Type 65519 and 65520: the first rounds back, the second overflows.",
    ),
    scenario(
        "flip a bit",
        &[("value", "1"), ("cursor", "1")],
        "Press f: with its first exponent bit set, 1 becomes infinity. Press f again, then mark the last bit with → and flip it: one ULP.",
    ),
    scenario(
        "FP8 overflow",
        &[("value", "1000"), ("in", "e4m3")],
        "E4M3 ends at 448: NaN in the plain conversion, 448 in a saturating one. Type 464 and 465: the edge.",
    ),
];

const RANGES: &[Scenario] = &[
    scenario(
        "gradients",
        &[("values", "1e-9,1e-7,1e-4,1"), ("from", ""), ("to", "")],
        "Four gradients. FP16 flushes the first and keeps only a few digits of the second; BF16 holds all.",
    ),
    scenario(
        "activations",
        &[("values", "0.01,300,70000"), ("from", ""), ("to", "")],
        "A residual stream's outlier of 70000 overflows FP16 and both FP8 formats; BF16 only rounds it.",
    ),
    scenario(
        "whole axis",
        &[("values", ""), ("from", "-150"), ("to", "130")],
        "Every format to scale: FP16 covers 40 binades of FP32's 277.",
    ),
    scenario(
        "near FP8",
        &[("values", "0.001,448,57344"), ("from", "-20"), ("to", "18")],
        "E4M3 spans 18 binades, E5M2 32: why gradients take E5M2 and weights E4M3. Move from and to with l and L.",
    ),
];

const ULP: &[Scenario] = &[
    scenario(
        "lost update",
        &[("center", "1"), ("update", "5e-5")],
        "An update the size of the learning rate, next to a weight of 1: FP16 and BF16 lose it. Press l on update until ▲ passes a ┴: then it survives.",
    ),
    scenario(
        "downwards",
        &[("center", "1"), ("update", "-3e-4")],
        "Below a power of two the grid is twice as fine: -3e-4 moves an FP16 weight of 1, +3e-4 does not. Try both.",
    ),
    scenario(
        "edge of FP16",
        &[("center", "65504"), ("update", "20")],
        "The spacing is 32 and 20 is more than half of it, but above 65504 there is only infinity: from 65520 on.",
    ),
    scenario(
        "a tie",
        &[("center", "1"), ("update", "2^-11")],
        "Exactly half an ULP: the tie goes to the even neighbour, here back to 1. With center 1 + 2^-10 it goes up.",
    ),
];

// A run would take the place of the gradients that these scenarios describe.
const SCALER: &[Scenario] = &[
    scenario(
        "sawtooth",
        &[("run", ""), ("growth_interval", "50")],
        "Press space. The scale climbs every 50 clean steps until it meets the ceiling (·) and falls by half: about 31 overflows in 2000 steps.",
    ),
    scenario(
        "drift and jump",
        &[("run", ""), ("drift", "-2"), ("jump-at", "1200"), ("jump", "6"), ("growth_interval", "50")],
        "Gradients shrink by 2 binades per 1000 steps, then jump by 6 at step 1200. The scale rises slowly and falls at once: watch the skipped steps after the jump.",
    ),
    scenario(
        "spikes",
        &[
            ("run", ""),
            ("spikes", "0.01"),
            ("spike", "8"),
            ("setting-2", "hysteresis=2"),
            ("setting-3", "mode=predictive"),
            ("growth_interval", "100"),
        ],
        "One step in a hundred is 256 times larger. Hysteresis forgives the first; the predictive rule keeps room. Compare overflows and mean scale.",
    ),
    scenario(
        "20 steps",
        &[
            ("run", ""),
            ("level", "none"),
            ("steps", "20"),
            ("overflow-at", "10"),
            ("init_scale", "32768"),
            ("growth_interval", "5"),
        ],
        "A textbook's example: no gradient overflows by itself, step 10 is injected. Step with . and inject your own with o.",
    ),
];

const SCALING: &[Scenario] = &[
    scenario(
        "lost tail",
        &[("run", ""), ("scale", "0"), ("mu", "-22"), ("sigma", "4")],
        "Unscaled gradients of a fine-tuning: the red left tail is zero in FP16. Press l on scale and watch it move into the window.",
    ),
    scenario(
        "too far",
        &[("run", ""), ("scale", "30"), ("mu", "-22"), ("sigma", "4")],
        "Scaled by 2^30 the right tail overflows: a single red value there loses the whole step. Press h.",
    ),
    scenario(
        "wide",
        &[("run", ""), ("scale", "0"), ("mu", "-18"), ("sigma", "8")],
        "Wider than FP16's window: no scale saves both tails. Change format to bf16: everything fits.",
    ),
    scenario(
        "FP8 gradients",
        &[("run", ""), ("scale", "12"), ("mu", "-20"), ("sigma", "3"), ("format", "e5m2")],
        "E5M2 has FP16's range with two mantissa bits; E4M3 (change format) has room for half of it: hence scales by tensor.",
    ),
];

const MEMORY: &[Scenario] = &[
    scenario(
        "7B on 80G",
        &[("model", "7b"), ("batch", "1"), ("seq", "2048"), ("memory", "80G")],
        "`7B fits 80 GB in BF16`: its weights do, training with Adam does not. Look at which recipes are green.",
    ),
    scenario(
        "KV cache",
        &[("model", "7b"), ("batch", "10"), ("seq", "2048"), ("memory", "80G")],
        "Ten sequences of 2048 tokens: the cache takes 10 GiB in FP16, not 80. It grows with batch × seq: double either.",
    ),
    scenario(
        "checkpointing",
        &[("model", "gpt2-xl"), ("batch", "8"), ("seq", "1024"), ("memory", "40G")],
        "Activations dominate: compare BF16 AMP with recomputation, which keeps one input a layer for one more forward pass.",
    ),
    scenario(
        "LoRA",
        &[("model", "7b"), ("batch", "1"), ("seq", "512"), ("memory", "24G"), ("rank", "16")],
        "A 24 GB card: only QLoRA (and LoRA at short sequences) fits a 7B model: PgDn to the last rows. Raise rank: it hardly matters.",
    ),
];

const SUMS: &[Scenario] = &[
    scenario(
        "0.1 forever",
        &[("terms", "tenths"), ("length", "65536"), ("dot", "")],
        "Adding 0.1: BF16 stands still at 32, FP16 at 256. Pairwise and FP32 inside go on; Kahan too, until BF16 is too coarse for the compensation.",
    ),
    scenario(
        "dot product",
        &[("terms", "uniform"), ("length", "4096"), ("dot", "yes")],
        "An inner product of 4096: the deepest of distilgpt2 is 3072. One by one in FP16 is off by percents, FP32 inside only by its last rounding.",
    ),
    scenario(
        "cancellation",
        &[("terms", "signed"), ("length", "16384"), ("dot", "")],
        "Positive and negative terms cancel, so what remains is small and every relative error large: FP32 too loses digits.",
    ),
    scenario(
        "overflow",
        &[("terms", "uniform"), ("length", "262144"), ("dot", "")],
        "The sum passes 65504: FP16 is infinite even with FP32 inside, for the result is stored in FP16.",
    ),
];

const BLOCKS: &[Scenario] = &[
    scenario(
        "calm",
        &[("run", ""), ("outlier", "1")],
        "No outlier: one scale serves the whole tensor, and blocks gain little. NVFP4 pays for its 4 bits with three times the error.",
    ),
    scenario(
        "outlier",
        &[("run", ""), ("outlier", "10000")],
        "One value a row is 10000 times larger. INT8 loses all others, FP8 the smallest; blocks of 32 or 16 confine the harm. Raise outlier.",
    ),
    scenario(
        "delayed",
        &[("run", ""), ("remembered", "0.25"), ("scheme", "delayed")],
        "The tensor grew fourfold since its scale was taken: delayed scaling cuts values off. At 4 instead it wastes two binades.",
    ),
    scenario(
        "NVFP4",
        &[("run", ""), ("outlier", "30"), ("scheme", "nvfp4")],
        "Two scales: E4M3 a block of 16, FP32 for the tensor. Follow a value: / scale, code, back.",
    ),
];

const SOFTMAX: &[Scenario] = &[
    scenario(
        "exp overflows",
        &[("logit", "12"), ("length", "16")],
        "A logit of 12: exp is 162755, beyond FP16. Plain is NaN, shifted is right. Lower logit to 11: both are.",
    ),
    scenario(
        "long context",
        &[("logit", "2"), ("length", "65536")],
        "65536 tokens: the FP16 sum of exps stands still at 2048, so the weights come out too large. FP32 is right.",
    ),
    scenario(
        "confident",
        &[("logit", "18"), ("length", "1024")],
        "One logit far above: the others' weights fall below 2^-25 and are zero in FP16; their gradients too.",
    ),
    scenario(
        "far position",
        &[("position", "4095")],
        "4095 in FP16 is 4096, in BF16 too: the sine is that of another token. At 1023 FP16 is still exact.",
    ),
];

const CRISES: &[Scenario] = &[
    scenario("all three", &[], "The three crises with their cures. Move each number until the cross becomes a tick."),
    scenario(
        "no cure",
        &[("small", "1e-14"), ("scale", "65536")],
        "A gradient of 1e-14 stays zero even scaled: raise scale to 2^24 and beyond, and watch the second crisis.",
    ),
    scenario(
        "large scale",
        &[("scale", "2^24"), ("large", "3")],
        "A scale of 2^24 rescues small gradients but the large one overflows; the scaler skips until it fits.",
    ),
    scenario(
        "patience",
        &[("steps", "20"), ("update", "5e-5")],
        "Twenty updates of 5e-5: the FP16 weight has not moved, the master has, and its FP16 copy follows (PgDn).",
    ),
];

const CASTS: &[Scenario] = &[
    scenario(
        "FP16",
        &[("policy", "fp16")],
        "Products, activations and gradients in FP16; the loss, statistics and masters in FP32.",
    ),
    scenario(
        "BF16",
        &[("policy", "bf16")],
        "The same operations in BF16: only the type differs, and no loss scale is needed.",
    ),
    scenario(
        "FP16 residual",
        &[("policy", "p=f32,c=f16,g=f16,r=f16")],
        "The residual stream in FP16, as a plain FP16 model has it; the default keeps it FP32, as under PyTorch's autocast. Compare the residual rows.",
    ),
    scenario(
        "FP32 gradients",
        &[("policy", "p=f32,c=f16,g=f32,r=f32")],
        "Weight gradients keep the product's FP32 accumulator: they cannot overflow, activations' gradients still can.",
    ),
];

fn cursor(instrument: &mut Instrument, change: i64) {
    let at = instrument.value("cursor").parse::<i64>().unwrap_or(0);
    let width = parse_format(instrument.value("in")).map_or(16, |format| i64::from(format.bits()));
    instrument.set("cursor", (at + change).rem_euclid(width).to_string());
}

fn replace(instrument: &mut Instrument, make: impl Fn(&str, crate::precision::FloatFormat) -> crate::Result<String>) {
    let format = parse_format(instrument.value("in"));
    if let Ok(value) = format.and_then(|format| make(instrument.value("value"), format)) {
        instrument.set("value", value);
    }
}

const BITS_KEYS: &[ViewKey] = &[
    key(KeyCode::Char('f'), "f", "flip", "flip the marked bit of the format `in`", |bits| {
        let bit = bits.value("cursor").parse().unwrap_or(0);
        replace(bits, |value, format| Bits::flipped(value, format, bit));
    }),
    key(KeyCode::Char('n'), "n", "next", "the next number of the format `in`", |bits| {
        replace(bits, |value, format| Bits::neighbour(value, format, true));
    }),
    key(KeyCode::Char('p'), "p", "previous", "the previous number of the format `in`", |bits| {
        replace(bits, |value, format| Bits::neighbour(value, format, false));
    }),
    key(KeyCode::Left, "←", "", "mark the bit to the left", |bits| cursor(bits, -1)),
    key(KeyCode::Right, "→", "", "mark the bit to the right", |bits| cursor(bits, 1)),
];

/// Moves the scaler's cursor by a share of the steps, at least one; `false` at the end.
fn advance(scaler: &mut Instrument, share: f64, forwards: bool) -> bool {
    let (first, last) = scaler.steps;
    let step = ((last - first) as f64 * share).round().max(1.0) as u64;
    let at = scaler.value("cursor").parse::<u64>().unwrap_or(if forwards { first } else { last });
    let to = if forwards { at.saturating_add(step) } else { at.saturating_sub(step) }.clamp(first, last);
    scaler.set("cursor", to.to_string());
    to < last
}

const SCALER_KEYS: &[ViewKey] = &[
    key(KeyCode::Char('.'), ".", "step", "one step on", |scaler| {
        advance(scaler, 0.0, true);
    }),
    key(KeyCode::Char('o'), "o", "overflow", "inject an overflow at the cursor's step", |scaler| {
        let at = scaler.value("cursor").to_owned();
        let at = if at.is_empty() { scaler.steps.1.to_string() } else { at };
        let mut steps: Vec<&str> = scaler.value("overflow-at").split(',').filter(|step| !step.is_empty()).collect();
        if !steps.contains(&at.as_str()) {
            steps.push(&at);
        }
        let steps = steps.join(",");
        scaler.set("overflow-at", steps);
    }),
    key(KeyCode::Left, "←", "", "the cursor a column back", |scaler| {
        advance(scaler, 1.0 / 70.0, false);
    }),
    key(KeyCode::Right, "→", "", "the cursor a column on", |scaler| {
        advance(scaler, 1.0 / 70.0, true);
    }),
    key(KeyCode::Home, "Home", "", "the cursor to the first step", |scaler| {
        scaler.set("cursor", scaler.steps.0.to_string());
    }),
    key(KeyCode::End, "End", "", "everything, without a cursor", |scaler| scaler.set("cursor", "")),
];

/// Advances the scaler's playback by a frame; restarts at the end.
fn play(scaler: &mut Instrument) -> bool {
    let at = scaler.value("cursor").parse::<u64>();
    if at.is_err() || at == Ok(scaler.steps.1) {
        scaler.set("cursor", scaler.steps.0.to_string());
        return true;
    }
    advance(scaler, 1.0 / 140.0, true)
}

/// The views with their initial parameters, from the arguments of the commands that print them.
pub fn instruments(views: &'static Command, run: &str) -> Vec<Instrument> {
    let instrument = |view: &'static Command| {
        let name = view.get_name();
        let (scenarios, keys): (_, &[_]) = match name {
            "bits" => (BITS, BITS_KEYS),
            "ranges" => (RANGES, &[]),
            "ulp" => (ULP, &[]),
            "scaler" => (SCALER, SCALER_KEYS),
            "scaling" => (SCALING, &[]),
            "memory" => (MEMORY, &[]),
            "sums" => (SUMS, &[]),
            "blocks" => (BLOCKS, &[]),
            "softmax" => (SOFTMAX, &[]),
            "crises" => (CRISES, &[]),
            _ => (CASTS, &[]),
        };
        let mut fields: Vec<_> = view.get_arguments().flat_map(Field::of).collect();
        if name != "bits" {
            fields.push(Field::new("run", run, Adjust::Typed));
        }
        let play = (name == "scaler").then_some(play as fn(&mut Instrument) -> bool);
        Instrument { scenarios, keys, play, ..Instrument::new(name, fields) }
    };
    views.get_subcommands().map(instrument).collect()
}
