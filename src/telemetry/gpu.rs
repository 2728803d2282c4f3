//! Samples the GPU's figures on its own thread, because a query may take milliseconds.
//!
//! NVIDIA's management library (NVML) comes with the driver and is loaded at run time; without it or a GPU there are no
//! figures, and nothing else changes.

use super::event::GpuStats;
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(any(feature = "cuda", test))]
use std::{thread, time::Duration};

/// Time between two samples.
#[cfg(feature = "cuda")]
const PERIOD: Duration = Duration::from_secs(1);

/// Samples a GPU until it is dropped.
#[derive(Debug)]
pub struct GpuSampler {
    newest: Arc<Mutex<Option<GpuStats>>>,
}

impl GpuSampler {
    /// Samples the GPU with this identity; `None` in a program built without the feature `cuda`.
    pub fn start(uuid: [u8; 16]) -> Option<Self> {
        #[cfg(feature = "cuda")]
        return Self::every(PERIOD, move || nvml::open(uuid));
        #[cfg(not(feature = "cuda"))]
        {
            let _ = uuid;
            None
        }
    }

    /// Calls the query that `open` returns every `period` on a new thread, which ends if `open` returns `None` or soon
    /// after the sampler is dropped.
    #[cfg(any(feature = "cuda", test))]
    fn every<L: FnMut() -> Option<GpuStats>>(
        period: Duration,
        open: impl FnOnce() -> Option<L> + Send + 'static,
    ) -> Option<Self> {
        let newest = Arc::new(Mutex::new(None));
        let place = Arc::downgrade(&newest);
        let sample = move || {
            let Some(mut query) = open() else { return };
            while place.strong_count() > 0 {
                let stats = query();
                if let Some(place) = place.upgrade() {
                    *place.lock().unwrap_or_else(PoisonError::into_inner) = stats;
                }
                thread::sleep(period);
            }
        };
        thread::Builder::new().name("gpu".into()).spawn(sample).ok().map(|_| Self { newest })
    }

    /// The newest figures, if there are any.
    pub fn newest(&self) -> Option<GpuStats> {
        *self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// NVML's names of a GPU and of a MIG partition with this identity.
#[cfg(any(feature = "cuda", test))]
fn names(uuid: [u8; 16]) -> [String; 2] {
    let digits = uuid.map(|byte| format!("{byte:02x}")).concat();
    let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &digits[range]);
    ["GPU", "MIG"].map(|kind| format!("{kind}-{a}-{b}-{c}-{d}-{e}"))
}

#[cfg(feature = "cuda")]
mod nvml {
    use super::{GpuStats, names};
    use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
    use nvml_wrapper::{Device, Nvml};

    /// The query for the GPU's figures; `None` without the library or the GPU.
    pub(super) fn open(uuid: [u8; 16]) -> Option<impl FnMut() -> Option<GpuStats>> {
        let library = Nvml::init().ok()?;
        let name = names(uuid).into_iter().find(|name| library.device_by_uuid(name.as_str()).is_ok())?;
        Some(move || query(&library.device_by_uuid(name.as_str()).ok()?))
    }

    /// A MIG partition does not report all of these.
    fn query(device: &Device) -> Option<GpuStats> {
        let memory = device.memory_info().ok()?;
        Some(GpuStats {
            utilization: device.utilization_rates().ok().map(|rates| rates.gpu as f32),
            memory_bytes: memory.used,
            memory_total_bytes: memory.total,
            power_w: device.power_usage().ok().map(|milliwatts| milliwatts as f32 / 1000.0),
            temperature_c: device.temperature(TemperatureSensor::Gpu).ok().map(|degrees| degrees as f32),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const PERIOD: Duration = Duration::from_millis(1);

    #[test]
    fn the_sampler_has_the_newest_figures_and_ends_its_thread_when_dropped() {
        let (sampled, samples) = channel();
        let sampler = GpuSampler::every(PERIOD, move || {
            let mut bytes = 0;
            Some(move || {
                bytes += 1;
                sampled.send(bytes).ok()?;
                Some(GpuStats { memory_bytes: bytes, ..GpuStats::default() })
            })
        });
        let sampler = sampler.expect("threads can be started");
        // The third query begins when the second one's figures are stored.
        assert_eq!(samples.iter().nth(2), Some(3));
        assert!(sampler.newest().is_some_and(|stats| stats.memory_bytes >= 2));
        drop(sampler);
        // Ends when the thread drops the sender.
        samples.iter().for_each(drop);
    }

    #[test]
    fn without_a_gpu_there_are_no_figures() {
        let (done, ended) = channel::<()>();
        let sampler = GpuSampler::every(PERIOD, move || {
            drop(done);
            None::<fn() -> Option<GpuStats>>
        });
        assert!(ended.recv().is_err());
        assert_eq!(sampler.expect("threads can be started").newest(), None);
    }

    #[test]
    fn a_gpu_is_named_by_its_identity() {
        let uuid = std::array::from_fn(|i| 17 * i as u8);
        let [gpu, mig] = names(uuid);
        assert_eq!(gpu, "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(mig, gpu.replace("GPU", "MIG"));
    }
}
