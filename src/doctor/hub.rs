//! Whether the Hub can be reached: one TCP connection to the endpoint, and nothing said over it.

use crate::store::hub::{Settings, without_password};
use serde::Serialize;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Name lookup and connection together take no longer.
const PATIENCE: Duration = Duration::from_secs(3);

/// What became of the attempt to reach the Hub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HubCheck {
    /// `HF_ENDPOINT` without its password, or the public one.
    pub endpoint: String,
    /// `None` where it was not tried.
    pub reachable: Option<bool>,
    /// What that means, and what to do.
    pub note: String,
}

/// Connects to the endpoint and hangs up.
pub fn check_hub(settings: &Settings) -> HubCheck {
    let endpoint = without_password(&settings.endpoint);
    if settings.offline {
        let note = "not tried: `HF_HUB_OFFLINE` is set, so only cached models are used".into();
        return HubCheck { endpoint, reachable: None, note };
    }
    match connect(settings) {
        Ok(took) => {
            HubCheck { endpoint, reachable: Some(true), note: format!("answers within {} ms", took.as_millis()) }
        }
        Err(why) => {
            let note = format!("{why}; use a local folder, a mirror by `HF_ENDPOINT`, or `--init random`");
            HubCheck { endpoint, reachable: Some(false), note }
        }
    }
}

/// How long the connection took, or why there is none.
fn connect(settings: &Settings) -> Result<Duration, String> {
    settings.check().map_err(|error| error.to_string())?;
    let (host, port) = settings.host_and_port().ok_or("it is no http address")?;
    let began = Instant::now();
    let (sender, receiver) = mpsc::channel();
    let wanted = (host.clone(), port);
    // A lookup takes no time limit: a thread makes it, and is abandoned after that long.
    std::thread::spawn(move || sender.send(wanted.to_socket_addrs().map(Iterator::collect::<Vec<_>>)));
    let addresses = receiver
        .recv_timeout(PATIENCE)
        .map_err(|_| format!("unreachable: no address for `{host}` within {} s", PATIENCE.as_secs()))?
        .map_err(|error| format!("unreachable: no address for `{host}` ({error})"))?;
    let try_one = |address: &SocketAddr| {
        let left = PATIENCE.checked_sub(began.elapsed()).filter(|left| !left.is_zero())?;
        TcpStream::connect_timeout(address, left).ok()
    };
    match addresses.iter().find_map(try_one) {
        Some(_) => Ok(began.elapsed()),
        None => Err(format!("unreachable: `{host}` takes no connection on port {port}")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    #[test]
    fn a_listening_endpoint_is_reachable_and_a_closed_one_is_not() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = |endpoint: &str| {
            let endpoint = endpoint.to_owned();
            connect(&Settings { endpoint, ..Settings::from_vars(|_| None) })
        };
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        at(&endpoint).unwrap();
        drop(listener);
        let began = Instant::now();
        assert!(at(&endpoint).unwrap_err().starts_with("unreachable"));
        assert!(at("http://no.such.host.invalid").unwrap_err().contains("no address for `no.such.host.invalid`"));
        assert!(began.elapsed() < 3 * PATIENCE);
    }
}
