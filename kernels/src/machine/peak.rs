//! The machine's peak arithmetic rate, measured by a loop that does not touch memory.
//!
//! `finetune bench` reports the engine's speed as a share of it.

use rayon::prelude::*;
use std::hint::black_box;
use std::time::{Duration, Instant};

#[cfg(target_arch = "x86_64")]
use crate::amx;
use crate::isa::{Isa, vectorize};
use crate::machine::spin::with_spinning_workers;

/// Independent sums: enough to hide the latency of a multiply-add, few enough for the registers of every CPU.
const SUMS: usize = 12;
/// Multiply-adds of each sum in one measurement.
const ROUNDS: usize = 1 << 18;
/// Words of memory that a thread reads or updates at a time.
const TASK_WORDS: usize = 1 << 18;
/// Duration of one measurement.
const MEASURED_TIME: Duration = Duration::from_millis(40);

/// A loop of multiply-adds, and the floating-point operations it does in one round.
#[derive(Clone, Copy)]
struct Loop {
    run: unsafe fn(usize),
    operations: usize,
}

/// GFLOP/s, or GB/s of memory, of all threads of the rayon pool together over a short while.
///
/// A CPU's clock changes with its load and its neighbors' by tens of percent within a second, so compare a rate only
/// with peaks measured right before and after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// The median of many bursts: the sustained rate.
    pub sustained: f64,
    /// The best burst.
    pub burst: f64,
}

/// The peak in FP32 multiply-adds.
pub fn measure_peak_f32() -> Peak {
    measure(f32_loop(Isa::current()))
}

/// The peak in products of BF16 values summed in FP32: by products of tiles or dot products if these are in use, else
/// widened to FP32.
pub fn measure_peak_bf16() -> Peak {
    measure(bf16_loop(Isa::current()))
}

/// GB/s of reading memory with all threads of the rayon pool, from a buffer larger than the caches.
pub fn measure_read_bandwidth() -> Peak {
    bandwidth(1, |buffer| {
        black_box(buffer.par_chunks_exact(TASK_WORDS).map(sum).sum::<u64>());
    })
}

/// As [`measure_read_bandwidth`], of reading and writing in place. It is higher where a core waits for reads, and not
/// for writes.
pub fn measure_update_bandwidth() -> Peak {
    bandwidth(2, |buffer| buffer.par_chunks_exact_mut(TASK_WORDS).for_each(increment))
}

/// The rates of passes over a buffer that read or write each word `accesses` times.
fn bandwidth(accesses: usize, pass: impl Fn(&mut [u64])) -> Peak {
    const WORDS: usize = 32 << 20;
    let mut buffer = vec![1_u64; WORDS];
    let bursts = (0..5).map(|_| {
        let begin = Instant::now();
        pass(&mut buffer);
        begin.elapsed()
    });
    peak(bursts.collect(), (accesses * WORDS * size_of::<u64>()) as f64)
}

/// Updates two places in turn, which is faster for the same reason as in [`sum`].
fn increment(part: &mut [u64]) {
    let (first, second) = part.split_at_mut(part.len() / 2);
    vectorize!({
        for (a, b) in first.iter_mut().zip(second) {
            *a = a.wrapping_add(1);
            *b = b.wrapping_add(1);
        }
    });
}

/// Reads four places in turn, because a core reads one alone more slowly: 17 instead of 30 GB/s on two cores of an
/// Emerald Rapids server.
fn sum(part: &[u64]) -> u64 {
    let place = |i: usize| part[i * part.len() / 4..][..part.len() / 4].as_chunks::<8>().0;
    let [a, b, c, d]: [&[[u64; 8]]; 4] = std::array::from_fn(place);
    let sums = vectorize!({
        // Sums outside of the closure would be kept in memory, and the loop, not the memory, would be measured.
        let mut sums = [[0_u64; 8]; 4];
        for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
            for (sums, words) in sums.iter_mut().zip([a, b, c, d]) {
                for (sum, word) in sums.iter_mut().zip(words) {
                    *sum = sum.wrapping_add(*word);
                }
            }
        }
        sums
    });
    sums.as_flattened().iter().sum()
}

/// The rates of bursts that each did `amount` operations or read this number of bytes.
fn peak(mut bursts: Vec<Duration>, amount: f64) -> Peak {
    bursts.sort_unstable();
    let rate = |burst: Duration| amount / burst.as_secs_f64() / 1e9;
    Peak { sustained: rate(bursts[bursts.len() / 2]), burst: rate(bursts[0]) }
}

fn measure(work: Loop) -> Peak {
    // SAFETY: the loops were chosen for the instruction set of this CPU.
    let once = || rayon::broadcast(|_| unsafe { (work.run)(ROUNDS) });
    let start = Instant::now();
    let mut bursts = Vec::new();
    // Waking threads would take up to a fifth of a burst.
    with_spinning_workers(|| {
        while start.elapsed() < MEASURED_TIME || bursts.len() < 3 {
            let begin = Instant::now();
            once();
            bursts.push(begin.elapsed());
        }
    });
    peak(bursts, (work.operations * ROUNDS * rayon::current_num_threads()) as f64)
}

fn f32_loop(isa: Isa) -> Loop {
    match isa {
        Isa::Portable => Loop { run: portable, operations: 2 * SUMS * 4 },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Loop { run: x86::avx2, operations: 2 * SUMS * 8 },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => Loop { run: x86::avx512, operations: 2 * SUMS * 16 },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::NeonBf16 => Loop { run: aarch64::neon, operations: 2 * SUMS * 4 },
    }
}

fn bf16_loop(isa: Isa) -> Loop {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => Loop { run: amx::products::<amx::AmxTiles>, operations: amx::OPERATIONS },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => Loop { run: x86::avx512_bf16, operations: 4 * SUMS * 16 },
        #[cfg(target_arch = "aarch64")]
        Isa::NeonBf16 => Loop { run: aarch64::neon_bf16, operations: 8 * SUMS * 4 },
        _ => f32_loop(isa),
    }
}

/// Defines a loop that replaces each of the sums by `$next` in every round.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! sums_loop {
    ($name:ident, $features:literal, $zero:expr, [$($value:ident = $of:expr),*], |$sum:ident| $next:expr) => {
        #[target_feature(enable = $features)]
        pub(super) fn $name(rounds: usize) {
            $(let $value = black_box($of);)*
            let mut sums = [$zero; SUMS];
            for _ in 0..rounds {
                for $sum in &mut sums {
                    *$sum = $next;
                }
            }
            black_box(sums);
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{SUMS, black_box};
    use std::arch::x86_64::{
        __m512bh, _mm_add_ps, _mm_mul_ps, _mm_set1_ps, _mm256_fmadd_ps, _mm256_set1_ps, _mm512_dpbf16_ps,
        _mm512_fmadd_ps, _mm512_set1_ps,
    };
    use std::mem::transmute;

    // SAFETY: both types are 512 bits of plain data.
    const BF16_ONES: __m512bh = unsafe { transmute([0x3f80_u16; 32]) };

    sums_loop! {
        portable, "sse", _mm_set1_ps(0.0), [a = _mm_set1_ps(1.0), b = _mm_set1_ps(0.5)],
        |sum| _mm_add_ps(_mm_mul_ps(a, *sum), b)
    }
    sums_loop! {
        avx2, "avx2,fma", _mm256_set1_ps(0.0), [a = _mm256_set1_ps(1.0), b = _mm256_set1_ps(0.5)],
        |sum| _mm256_fmadd_ps(a, b, *sum)
    }
    sums_loop! {
        avx512, "avx512f", _mm512_set1_ps(0.0), [a = _mm512_set1_ps(1.0), b = _mm512_set1_ps(0.5)],
        |sum| _mm512_fmadd_ps(a, b, *sum)
    }
    sums_loop! {
        avx512_bf16, "avx512f,avx512bf16", _mm512_set1_ps(0.0), [ones = BF16_ONES],
        |sum| _mm512_dpbf16_ps(*sum, ones, ones)
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::{SUMS, black_box};
    use crate::neon::multiply_bf16;
    use std::arch::aarch64::{vdupq_n_f32, vdupq_n_u32, vfmaq_f32};

    sums_loop! {
        neon, "neon", vdupq_n_f32(0.0), [a = vdupq_n_f32(1.0), b = vdupq_n_f32(0.5)],
        |sum| vfmaq_f32(*sum, a, b)
    }
    sums_loop! {
        neon_bf16, "neon,bf16", vdupq_n_f32(0.0), [ones = vdupq_n_u32(0x3f80_3f80)],
        |sum| multiply_bf16(*sum, ones, ones)
    }
}

#[cfg(target_arch = "x86_64")]
use x86::portable;

#[cfg(not(target_arch = "x86_64"))]
fn portable(rounds: usize) {
    let (a, b) = (black_box([0.999f32; 4]), black_box([0.5f32; 4]));
    let mut sums = [[0f32; 4]; SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            for lane in 0..4 {
                sum[lane] = a[lane] * sum[lane] + b[lane];
            }
        }
    }
    black_box(sums);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_does_a_billion_operations_a_second() {
        for peak in [measure_peak_f32(), measure_peak_bf16()] {
            assert!(1.0 < peak.sustained && peak.sustained <= peak.burst && peak.burst < 1e6, "{peak:?}");
        }
    }

    #[test]
    fn the_bandwidth_counts_every_word() {
        let mut part: Vec<u64> = (0..1 << 10).collect();
        assert_eq!(sum(&part), part.iter().sum::<u64>());
        increment(&mut part);
        assert!(part.iter().copied().eq(1..=1 << 10));
    }

    /// Rates of two measurements cannot be compared on a busy machine, but operation counts can: an instruction of BF16
    /// multiplies and adds at least as many values as one of FP32.
    #[test]
    fn a_round_in_bf16_has_no_fewer_operations() {
        for &isa in Isa::ALL {
            let (f32, bf16) = (f32_loop(isa).operations, bf16_loop(isa).operations);
            assert!(f32 % (2 * SUMS) == 0 && bf16 >= f32, "{isa}: {bf16} operations against {f32}");
        }
    }
}
