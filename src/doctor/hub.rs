//! Whether the Hub can be reached: one TCP connection to the endpoint, and nothing said over it.

use crate::store::hub::Settings;
use serde::Serialize;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Name lookup and connection together take no longer.
const PATIENCE: Duration = Duration::from_secs(3);

/// What became of the attempt to reach the Hub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HubCheck {
    /// `HF_ENDPOINT`, or the public one.
    pub endpoint: String,
    /// `None` where it was not tried.
    pub reachable: Option<bool>,
    /// What that means, and what to do.
    pub note: String,
}

/// Connects to the endpoint and hangs up.
pub fn check_hub(settings: &Settings) -> HubCheck {
    let endpoint = settings.endpoint.clone();
    if settings.offline {
        let note = "not tried: `HF_HUB_OFFLINE` is set, so only cached models are used".into();
        return HubCheck { endpoint, reachable: None, note };
    }
    match connect(&endpoint) {
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
fn connect(endpoint: &str) -> Result<Duration, String> {
    let (host, port) = host_and_port(endpoint).ok_or_else(|| format!("`{endpoint}` is no http address"))?;
    let began = Instant::now();
    let (sender, receiver) = mpsc::channel();
    let wanted = (host.clone(), port);
    // A lookup cannot be given a limit, so it has a thread that nobody waits for longer than that.
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

fn host_and_port(endpoint: &str) -> Option<(String, u16)> {
    let (rest, port) = match endpoint.split_once("://")? {
        ("https", rest) => (rest, 443),
        ("http", rest) => (rest, 80),
        _ => return None,
    };
    let authority = rest.split('/').next()?.rsplit('@').next()?;
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, given)) if !given.ends_with(']') => (host, given.parse().ok()?),
        _ => (authority, port),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    #[test]
    fn addresses_are_taken_apart() {
        for (endpoint, expected) in [
            ("https://hub.test", Some(("hub.test", 443))),
            ("http://hub.test/a/b", Some(("hub.test", 80))),
            ("http://user:word@127.0.0.1:8080/", Some(("127.0.0.1", 8080))),
            ("http://[::1]:9", Some(("::1", 9))),
            ("https://[::1]", Some(("::1", 443))),
            ("ftp://hub.test", None),
            ("hub.test", None),
            ("http://:80", None),
            ("http://hub.test:port", None),
        ] {
            let expected = expected.map(|(host, port)| (host.to_owned(), port));
            assert_eq!(host_and_port(endpoint), expected, "{endpoint}");
        }
    }

    #[test]
    fn a_listening_endpoint_is_reachable_and_a_closed_one_is_not() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        connect(&endpoint).unwrap();
        drop(listener);
        let began = Instant::now();
        assert!(connect(&endpoint).unwrap_err().starts_with("unreachable"));
        assert!(connect("http://no.such.host.invalid").unwrap_err().contains("no address for `no.such.host.invalid`"));
        assert!(began.elapsed() < 3 * PATIENCE);
    }
}
