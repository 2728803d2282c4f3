//! Intel's AMX: eight tile registers of 16 rows of 64 bytes, and products of two tiles of BF16 values.
//!
//! Stable Rust has no intrinsics for them, so each instruction is inline assembly. Tiles keep their content from one
//! instruction to the next because the compiler never uses them: nothing here is compiled with the feature `amx-tile`.
//!
//! A process must ask Linux for the tiles before it uses them, once for all its threads. A thread configures them
//! before a task and releases them after it: that takes some 200 cycles, and without the release the system would save
//! 8 KiB for each switch of threads, and idle cores could not sleep deeply.

use std::fmt;
use std::sync::OnceLock;

/// Rows of a tile.
#[cfg(any(target_arch = "x86_64", test))]
pub(super) const ROWS: usize = 16;
/// FP32 values, or pairs of BF16 values, in a row of a tile.
pub(super) const COLUMNS: usize = 16;

/// Whether this process may use AMX with BF16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AmxSupport {
    /// It may.
    Available,
    /// The CPU has no tiles, or no BF16 products of them.
    Missing,
    /// The system, or the virtual machine, does not save tiles.
    NotEnabled,
    /// Linux refused, with this error.
    Denied(i32),
}

impl fmt::Display for AmxSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Available => f.write_str("the kernel grants its tiles, for BF16 products"),
            Self::Missing => f.write_str("this CPU lacks AMX with BF16"),
            Self::NotEnabled => f.write_str("the operating system does not save the tiles of this CPU's AMX"),
            Self::Denied(code) => {
                write!(
                    f,
                    "the kernel refused the tiles of this CPU's AMX: {}",
                    std::io::Error::from_raw_os_error(*code)
                )
            }
        }
    }
}

/// Whether this process may use AMX with BF16. The first call asks the kernel.
pub fn support() -> AmxSupport {
    static SUPPORT: OnceLock<AmxSupport> = OnceLock::new();
    *SUPPORT.get_or_init(request)
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn request() -> AmxSupport {
    AmxSupport::Missing
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request() -> AmxSupport {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    /// Bit of CPUID leaf 1, ECX: `xgetbv` may be used.
    const OSXSAVE: u32 = 1 << 27;
    /// Bits of CPUID leaf 7, EDX.
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    /// The tiles' data, a component of the state that the system saves; the one below is their configuration.
    const XTILE_DATA: u32 = 18;
    const XTILE: u64 = 1 << XTILE_DATA | 1 << (XTILE_DATA - 1);
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    /// # Safety
    /// The system must have enabled `xgetbv`.
    #[target_feature(enable = "xsave")]
    unsafe fn enabled_states() -> u64 {
        // SAFETY: the caller's promise; register 0 always exists.
        unsafe { _xgetbv(0) }
    }
    let needed = AMX_BF16 | AMX_TILE;
    if __cpuid(0).eax < 7 || __cpuid_count(7, 0).edx & needed != needed {
        return AmxSupport::Missing;
    }
    // SAFETY: `xgetbv` is only executed where the system has enabled it.
    if __cpuid(1).ecx & OSXSAVE == 0 || unsafe { enabled_states() } & XTILE != XTILE {
        return AmxSupport::NotEnabled;
    }
    // SAFETY: the call only changes the features that the process may use.
    let refused = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, libc::c_long::from(XTILE_DATA)) };
    match refused {
        0 => AmxSupport::Available,
        _ => AmxSupport::Denied(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
    }
}

/// A thread's eight tiles, numbered from 0, each of [`ROWS`] rows of 64 bytes. Tests replace them with a model.
#[cfg(any(target_arch = "x86_64", test))]
pub(super) trait TileUnit {
    /// Sets the sizes of this thread's tiles.
    ///
    /// # Safety
    /// The tiles must be [`AmxSupport::Available`].
    unsafe fn configure();

    /// Gives the tiles back.
    ///
    /// # Safety
    /// As [`TileUnit::configure`].
    unsafe fn release();

    /// The tiles of this thread.
    ///
    /// # Safety
    /// They must be configured, and stay so while the value exists; it must stay on this thread.
    unsafe fn new() -> Self;

    fn zero<const TILE: u8>(&mut self);

    /// Loads a tile from rows of [`COLUMNS`] words that are `stride` words apart.
    fn load<const TILE: u8>(&mut self, from: &[u32], stride: usize);

    /// `sums[m][n] += a[m][2 k] * b[k][2 n] + a[m][2 k + 1] * b[k][2 n + 1]`, over all k, for tiles of BF16 pairs `a`
    /// and `b`.
    ///
    /// Sums of even and of odd elements are rounded to FP32 after each product, then added. Subnormal inputs and
    /// results are taken for zero.
    fn multiply<const SUMS: u8, const A: u8, const B: u8>(&mut self);

    /// Stores a tile to rows of [`COLUMNS`] numbers that are `stride` numbers apart.
    fn store<const TILE: u8>(&self, to: &mut [f32], stride: usize);
}

/// Fails where `len` elements are fewer than a tile's, whose rows are `stride` apart.
#[cfg(any(target_arch = "x86_64", test))]
#[inline(always)]
fn check_room(len: usize, stride: usize) {
    assert!(len >= (ROWS - 1) * stride + COLUMNS, "{len} elements for a tile");
}

/// Floating-point operations of a round of [`products`].
#[cfg(target_arch = "x86_64")]
pub(super) const OPERATIONS: usize = 6 * (ROWS * COLUMNS * 2 * COLUMNS * 2);

/// Rounds of six independent products of tiles, as many as hide the latency of one.
///
/// # Safety
/// The tiles must be [`AmxSupport::Available`].
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn products<T: TileUnit>(rounds: usize) {
    let ones = [0x3f80_3f80_u32; ROWS * COLUMNS];
    // SAFETY: the caller's promise; the tiles are configured before they are used.
    unsafe {
        T::configure();
        let mut tiles = T::new();
        tiles.load::<6>(&ones, COLUMNS);
        tiles.load::<7>(&ones, COLUMNS);
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        tiles.zero::<3>();
        tiles.zero::<4>();
        tiles.zero::<5>();
        for _ in 0..rounds {
            tiles.multiply::<0, 6, 7>();
            tiles.multiply::<1, 6, 7>();
            tiles.multiply::<2, 6, 7>();
            tiles.multiply::<3, 6, 7>();
            tiles.multiply::<4, 6, 7>();
            tiles.multiply::<5, 6, 7>();
        }
        T::release();
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use hardware::AmxTiles;

#[cfg(target_arch = "x86_64")]
mod hardware {
    use super::{ROWS, TileUnit, check_room};
    use std::arch::asm;
    use std::marker::PhantomData;

    /// The CPU's own tiles.
    #[derive(Clone, Copy, Debug)]
    pub(in super::super) struct AmxTiles(PhantomData<*const ()>);

    /// The operand of `ldtilecfg`.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    static ALL_WHOLE: Configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: {
            const WHOLE: u8 = ROWS as u8;
            [WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, 0, 0, 0, 0, 0, 0, 0, 0]
        },
    };

    /// The instruction `$name tmm$tile $rest`, which changes that tile; the compiler gets the tile as an output.
    macro_rules! change {
        ($tile:ident, $name:literal, $rest:literal $($operands:tt)*) => {
            match $tile {
                0 => change!(@ "tmm0", $name, $rest $($operands)*),
                1 => change!(@ "tmm1", $name, $rest $($operands)*),
                2 => change!(@ "tmm2", $name, $rest $($operands)*),
                3 => change!(@ "tmm3", $name, $rest $($operands)*),
                4 => change!(@ "tmm4", $name, $rest $($operands)*),
                5 => change!(@ "tmm5", $name, $rest $($operands)*),
                6 => change!(@ "tmm6", $name, $rest $($operands)*),
                7 => change!(@ "tmm7", $name, $rest $($operands)*),
                _ => unreachable!("there are eight tiles"),
            }
        };
        (@ $register:tt, $name:literal, $rest:literal $($operands:tt)*) => {
            asm!(concat!($name, " ", $register, $rest) $($operands)*, out($register) _, options(nostack, preserves_flags))
        };
    }

    impl TileUnit for AmxTiles {
        #[inline(always)]
        unsafe fn new() -> Self {
            Self(PhantomData)
        }

        #[inline]
        unsafe fn configure() {
            // SAFETY: the caller's promise; the configuration is valid for palette 1.
            unsafe {
                asm!(
                    "ldtilecfg [{}]",
                    in(reg) &raw const ALL_WHOLE,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, preserves_flags),
                );
            }
        }

        #[inline]
        unsafe fn release() {
            // SAFETY: the caller's promise.
            unsafe {
                asm!(
                    "tilerelease",
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, preserves_flags),
                );
            }
        }

        #[inline(always)]
        fn zero<const TILE: u8>(&mut self) {
            // SAFETY: the tiles are configured.
            unsafe { change!(TILE, "tilezero", "") }
        }

        #[inline(always)]
        fn load<const TILE: u8>(&mut self, from: &[u32], stride: usize) {
            check_room(from.len(), stride);
            // SAFETY: the tiles are configured, and the rows lie within `from`.
            unsafe {
                change!(TILE, "tileloadd", ", [{from} + {stride}*4]", from = in(reg) from.as_ptr(), stride = in(reg) stride);
            }
        }

        #[inline(always)]
        fn multiply<const SUMS: u8, const A: u8, const B: u8>(&mut self) {
            // SAFETY: the tiles are configured.
            unsafe { change!(SUMS, "tdpbf16ps", ", tmm{a}, tmm{b}", a = const A, b = const B) }
        }

        #[inline(always)]
        fn store<const TILE: u8>(&self, to: &mut [f32], stride: usize) {
            check_room(to.len(), stride);
            // SAFETY: the tiles are configured, and the rows lie within `to`.
            unsafe {
                asm!(
                    "tilestored [{to} + {stride}*4], tmm{tile}",
                    to = in(reg) to.as_mut_ptr(),
                    stride = in(reg) stride,
                    tile = const TILE,
                    options(nostack, preserves_flags),
                );
            }
        }
    }
}

/// The tiles in plain Rust, to test the kernels around them on any machine.
#[cfg(test)]
pub(super) mod model {
    use super::{COLUMNS, ROWS, TileUnit, check_room};
    use std::cell::Cell;

    /// Eight tiles of 32-bit patterns; tiles that were not loaded hold signalling patterns.
    #[derive(Clone, Debug)]
    pub(in super::super) struct EmulatedTiles([[[u32; COLUMNS]; ROWS]; 8]);

    thread_local! {
        static CONFIGURED: Cell<bool> = const { Cell::new(false) };
    }

    fn check() {
        assert!(CONFIGURED.get(), "the tiles are used before they are configured");
    }

    fn flushed(value: f32) -> f32 {
        if value.abs() < f32::MIN_POSITIVE { 0f32.copysign(value) } else { value }
    }

    fn halves(pair: u32) -> [f32; 2] {
        [pair << 16, pair & 0xffff_0000].map(|bits| flushed(f32::from_bits(bits)))
    }

    impl TileUnit for EmulatedTiles {
        unsafe fn new() -> Self {
            Self([[[0x7fa0_7fa0; COLUMNS]; ROWS]; 8])
        }

        unsafe fn configure() {
            assert!(!CONFIGURED.replace(true), "the tiles are configured twice");
        }

        unsafe fn release() {
            assert!(CONFIGURED.replace(false), "the tiles are released twice");
        }

        fn zero<const TILE: u8>(&mut self) {
            check();
            self.0[usize::from(TILE)] = [[0; COLUMNS]; ROWS];
        }

        fn load<const TILE: u8>(&mut self, from: &[u32], stride: usize) {
            check();
            check_room(from.len(), stride);
            for (row, from) in self.0[usize::from(TILE)].iter_mut().zip(from.chunks(stride)) {
                row.copy_from_slice(&from[..COLUMNS]);
            }
        }

        fn multiply<const SUMS: u8, const A: u8, const B: u8>(&mut self) {
            check();
            let (a, b) = (self.0[usize::from(A)], self.0[usize::from(B)]);
            let b = b.map(|row| [0, 1].map(|half| row.map(|pair| halves(pair)[half])));
            for (sums, a) in self.0[usize::from(SUMS)].iter_mut().zip(&a) {
                let mut parts = [[0f32; COLUMNS]; 2];
                for (a, b) in a.iter().zip(&b) {
                    for ((parts, a), b) in parts.iter_mut().zip(halves(*a)).zip(b) {
                        for (part, b) in parts.iter_mut().zip(b) {
                            // A product of two BF16 values is exact in FP32, so that this is a fused multiply-add.
                            *part = flushed(*part + a * b);
                        }
                    }
                }
                let [even, odd] = parts;
                for ((sum, even), odd) in sums.iter_mut().zip(even).zip(odd) {
                    *sum = flushed(f32::from_bits(*sum) + flushed(even + odd)).to_bits();
                }
            }
        }

        fn store<const TILE: u8>(&self, to: &mut [f32], stride: usize) {
            check();
            check_room(to.len(), stride);
            for (row, to) in self.0[usize::from(TILE)].iter().zip(to.chunks_mut(stride)) {
                to.iter_mut().zip(row).for_each(|(to, bits)| *to = f32::from_bits(*bits));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::model::EmulatedTiles;
    use super::{COLUMNS, ROWS, TileUnit};
    use half::bf16;

    /// Two tiles of BF16 pairs, the sums they are added to, and their product by `T`. The row stride is 80 bytes.
    ///
    /// # Safety
    /// This process must have the tiles, if `T` is the CPU's.
    unsafe fn product<T: TileUnit>(a: &[bf16], b: &[bf16], sums: &[f32]) -> Vec<u32> {
        const STRIDE: usize = 20;
        let spread = |values: &[u32]| {
            let mut memory = vec![u32::MAX; ROWS * STRIDE];
            for (to, from) in memory.chunks_mut(STRIDE).zip(values.chunks(COLUMNS)) {
                to[..COLUMNS].copy_from_slice(from);
            }
            memory
        };
        let pairs = |values: &[bf16]| {
            let (pairs, _) = values.as_chunks::<2>();
            let word = |[low, high]: &[bf16; 2]| u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
            spread(&pairs.iter().map(word).collect::<Vec<_>>())
        };
        let (a, b) = (pairs(a), pairs(b));
        let sums = spread(&sums.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>());
        let mut out = vec![0f32; ROWS * STRIDE];
        // SAFETY: the caller's promise; the tiles are configured first.
        unsafe {
            T::configure();
            let mut tiles = T::new();
            tiles.zero::<3>();
            tiles.load::<5>(&a, STRIDE);
            tiles.load::<6>(&b, STRIDE);
            tiles.multiply::<3, 5, 6>();
            tiles.load::<1>(&sums, STRIDE);
            tiles.multiply::<1, 5, 6>();
            tiles.store::<3>(&mut out, STRIDE);
            let alone = out.clone();
            tiles.store::<1>(&mut out, STRIDE);
            T::release();
            alone.into_iter().chain(out).map(f32::to_bits).collect()
        }
    }

    /// Values in [-2, 2), every eighth subnormal or tiny.
    #[cfg(target_arch = "x86_64")]
    fn values(len: usize, seed: u32) -> Vec<bf16> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let value = |draw: u32| {
            let plain = bf16::from_f32(draw as f32 / (1 << 22) as f32 - 2.0);
            if draw.is_multiple_of(8) { bf16::from_bits(plain.to_bits() & 0x80ff) } else { plain }
        };
        (0..len).map(|_| value(next())).collect()
    }

    #[test]
    fn the_model_multiplies_matrices() {
        let whole = |len: usize, step: usize| (0..len).map(|i| bf16::from_f32((i * step % 7) as f32 - 3.0)).collect();
        let a: Vec<bf16> = whole(512, 3);
        let b: Vec<bf16> = whole(512, 5);
        let sums: Vec<f32> = (0..256).map(|i| i as f32).collect();
        // SAFETY: the model needs nothing.
        let found = unsafe { product::<EmulatedTiles>(&a, &b, &sums) };
        for m in 0..ROWS {
            for n in 0..COLUMNS {
                let term = |k: usize| a[m * 32 + k].to_f32() * b[(k / 2) * 32 + 2 * n + k % 2].to_f32();
                let expected: f32 = (0..32).map(term).sum();
                let at = |part: usize| f32::from_bits(found[part * ROWS * 20 + m * 20 + n]);
                assert_eq!([at(0), at(1)], [expected, expected + sums[m * 16 + n]], "({m}, {n})");
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    #[ignore = "needs a CPU with AMX, where .ci/run runs it"]
    fn the_cpus_tiles_compute_the_models_bits() {
        assert_eq!(super::support(), super::AmxSupport::Available);
        for seed in 0..50 {
            let a = values(512, seed);
            let b = values(512, seed + 100);
            let sums: Vec<f32> = values(256, seed + 200).into_iter().map(bf16::to_f32).collect();
            // SAFETY: the tiles are granted.
            let (real, model) =
                unsafe { (product::<super::AmxTiles>(&a, &b, &sums), product::<EmulatedTiles>(&a, &b, &sums)) };
            assert!(real == model, "the tiles differ from their model with seed {seed}");
        }
    }
}
