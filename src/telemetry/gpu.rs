//! Samples the GPU's figures on its own thread, because a query may take milliseconds.
//!
//! NVIDIA's management library (NVML) comes with the driver and is loaded at run time; without it or a GPU there are no
//! figures, and nothing else changes.

use super::event::GpuStats;
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(any(feature = "nvml", test))]
use std::{thread, time::Duration};

/// Time between two samples.
#[cfg(feature = "nvml")]
const PERIOD: Duration = Duration::from_secs(1);

/// Samples a GPU until it is dropped.
#[derive(Debug)]
pub struct GpuSampler {
    newest: Arc<Mutex<Option<GpuStats>>>,
}

impl GpuSampler {
    /// Samples the GPU with CUDA's device number `ordinal`; `None` in a program built without the feature `nvml`.
    pub fn start(ordinal: usize) -> Option<Self> {
        #[cfg(feature = "nvml")]
        return Self::every(PERIOD, move || nvml::open(ordinal));
        #[cfg(not(feature = "nvml"))]
        {
            let _ = ordinal;
            None
        }
    }

    /// Calls the query that `open` returns every `period` on a new thread, which ends if `open` returns `None` or soon
    /// after the sampler is dropped.
    #[cfg(any(feature = "nvml", test))]
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

/// How NVML names a GPU.
#[cfg(any(feature = "nvml", test))]
#[derive(Debug, PartialEq, Eq)]
enum Name {
    Index(u32),
    Uuid(String),
}

/// NVML's name of CUDA's device `ordinal`. NVML counts all GPUs, CUDA only those that `CUDA_VISIBLE_DEVICES` lists by
/// number or UUID.
#[cfg(any(feature = "nvml", test))]
fn name(ordinal: usize, visible: Option<&str>) -> Option<Name> {
    let Some(visible) = visible else { return Some(Name::Index(ordinal as u32)) };
    let named = visible.split(',').nth(ordinal)?.trim();
    match named.parse() {
        Ok(index) => Some(Name::Index(index)),
        Err(_) if named.starts_with("GPU-") || named.starts_with("MIG-") => Some(Name::Uuid(named.to_owned())),
        Err(_) => None,
    }
}

#[cfg(feature = "nvml")]
mod nvml {
    use super::{GpuStats, Name, name};
    use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
    use nvml_wrapper::error::NvmlError;
    use nvml_wrapper::{Device, Nvml};

    /// The query for the GPU's figures; `None` without the library or the GPU.
    pub(super) fn open(ordinal: usize) -> Option<impl FnMut() -> Option<GpuStats>> {
        let name = name(ordinal, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())?;
        let library = Nvml::init().ok()?;
        device(&library, &name).ok()?;
        Some(move || query(&device(&library, &name).ok()?))
    }

    fn device<'a>(library: &'a Nvml, name: &Name) -> Result<Device<'a>, NvmlError> {
        match name {
            Name::Index(index) => library.device_by_index(*index),
            Name::Uuid(uuid) => library.device_by_uuid(uuid.as_str()),
        }
    }

    /// A MIG partition does not report all of these.
    fn query(device: &Device) -> Option<GpuStats> {
        let memory = device.memory_info().ok()?;
        Some(GpuStats {
            utilisation: device.utilization_rates().ok().map(|rates| rates.gpu as f32),
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
        assert!(samples.iter().count() < 1000, "the thread drops the sender");
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
    #[cfg(feature = "nvml")]
    fn the_library_is_loaded_at_run_time() {
        let sampler = GpuSampler::start(0).expect("this build has a sampler");
        thread::sleep(Duration::from_millis(500));
        let driver = std::path::Path::new("/proc/driver/nvidia/version").exists();
        assert!(driver || sampler.newest().is_none());
    }

    #[test]
    fn cuda_counts_the_visible_gpus() {
        assert_eq!(name(1, None), Some(Name::Index(1)));
        assert_eq!(name(0, Some("3,1")), Some(Name::Index(3)));
        assert_eq!(name(1, Some("3, GPU-8a1")), Some(Name::Uuid("GPU-8a1".into())));
        assert_eq!([name(0, Some("")), name(2, Some("3,1")), name(0, Some("none"))], [None, None, None]);
    }
}
