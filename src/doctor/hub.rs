//! Checks whether the Hub is reachable.

use crate::store::hub::{Settings, connect, without_password};
use serde::Serialize;
use std::time::Duration;

/// Timeout for name lookup and connection together.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The result of the check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HubStatus {
    /// `HF_ENDPOINT` without its password, or the public one.
    pub endpoint: String,
    /// `None` if it was not tried.
    pub reachable: Option<bool>,
    /// An explanation, and what to do.
    pub note: String,
}

/// Connects to the endpoint and disconnects.
pub fn check_hub(settings: &Settings) -> HubStatus {
    let endpoint = without_password(&settings.endpoint);
    if settings.offline {
        let note = "not tried: `HF_HUB_OFFLINE` is set, so only cached models are used".into();
        return HubStatus { endpoint, reachable: None, note };
    }
    match connect(settings, TIMEOUT) {
        Ok(took) => {
            HubStatus { endpoint, reachable: Some(true), note: format!("answers within {} ms", took.as_millis()) }
        }
        Err(why) => {
            let note = format!("{why}; use a local folder or a mirror (`HF_ENDPOINT=URL`)");
            HubStatus { endpoint, reachable: Some(false), note }
        }
    }
}
