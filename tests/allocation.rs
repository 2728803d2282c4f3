//! A steady-state training step allocates almost nothing, because its buffers are allocated in the first step.
//!
//! It is a separate binary, because the counting allocator is global.
#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is not as it should be")]

mod common {
    pub(crate) mod compare;
    pub(crate) mod engine;
    pub(crate) mod golden;
    pub(crate) mod oracle;
}

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use candle_core::Device;
use common::engine::{Settings, engine};
use finetune::data::{BatchLoader, TokenSource, grammar};
use finetune::engine::model::{Keep, ModelSpec};
use finetune::engine::optim::AdamWConfig;
use finetune::lab::{Group, Memory};
use finetune::precision::{GradScaler, GradScalerConfig, PrecisionPolicy};
use finetune::train::TrainState;

/// Bytes allocated since the start by all threads, not reduced by freeing.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to `System` unchanged; counting touches no memory but the counter.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATED.fetch_add(new_size, Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(old, layout, new_size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LIMIT: usize = 64 << 10;
/// Limit on an engine's allocations besides its buffers: the survey's histogram for each parameter, and names.
const SMALL_THINGS: usize = 128 << 10;
/// After these steps, every thread has its scratch memory for every part of a step.
const WARM_UP: usize = 20;

#[test]
fn a_steady_state_step_allocates_at_most_64_kb() {
    let config = ModelSpec::named("tiny").unwrap();
    let text = grammar::text(1, 60_000);
    for policy in [PrecisionPolicy::FP32, PrecisionPolicy::FP16, PrecisionPolicy::BF16] {
        for grad_accum in [1, 2] {
            let scaler = GradScalerConfig { growth_interval: 7, ..GradScalerConfig::default() };
            let masters = TrainState::random_masters(&config, 3, &Device::Cpu).unwrap();
            let settings = Settings {
                policy,
                scaler: GradScaler::new(scaler).unwrap(),
                adamw: AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 },
                lr: 1e-3,
                max_grad_norm: Some(1.0),
                batch: (4, 64),
                grad_accum,
            };
            let before = ALLOCATED.load(Relaxed);
            let mut engine = engine(&config, masters, settings);
            // The masters were there before.
            let items = Memory::engine(&config, policy, [4, 64, grad_accum], Keep::All).unwrap();
            let told: u64 = items.iter().filter(|item| item.group != Group::Masters).map(|item| item.bytes).sum();
            let allocated = ALLOCATED.load(Relaxed) - before;
            let untold = allocated.checked_sub(told as usize);
            assert!(untold.is_some_and(|bytes| bytes < SMALL_THINGS), "{policy}: allocated {allocated}, told {told}");
            engine.exponents = true;
            let tokens = TokenSource::from_ids(text.bytes().map(u32::from).collect());
            let mut loader = BatchLoader::new(tokens, 4, 64, 5).unwrap();
            let mut micro_batches = vec![loader.batch(); grad_accum];
            let mut step = || {
                let before = ALLOCATED.load(Relaxed);
                for batch in &mut micro_batches {
                    loader.next_batch(batch);
                }
                engine.step(&micro_batches).unwrap();
                ALLOCATED.load(Relaxed) - before
            };
            let most = (0..WARM_UP + 20).map(|_| step()).skip(WARM_UP).max().unwrap();
            assert!(most <= LIMIT, "{policy}, {grad_accum} micro-batches: a step allocated {most} bytes");
        }
    }
}
