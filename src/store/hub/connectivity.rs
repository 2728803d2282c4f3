//! Checks for a network by connecting to the endpoint.

use super::Settings;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Variables that set a proxy, which may reach hosts that this machine cannot connect to. Requests use any of them for
/// any endpoint.
const PROXIES: [&str; 6] = ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];

/// Connects to the endpoint and disconnects; returns the time taken, or why it failed. Name lookup and connection
/// together take at most `timeout`.
pub fn connect(settings: &Settings, timeout: Duration) -> Result<Duration, String> {
    settings.check().map_err(|error| error.to_string())?;
    let (host, port) = settings.host_and_port().ok_or("it is not an HTTP URL")?;
    let began = Instant::now();
    let (sender, receiver) = mpsc::channel();
    let wanted = (host.clone(), port);
    // A lookup has no timeout, so it runs on a thread that is abandoned after `timeout`.
    std::thread::spawn(move || sender.send(wanted.to_socket_addrs().map(Iterator::collect::<Vec<_>>)));
    let addresses = receiver
        .recv_timeout(timeout)
        .map_err(|_| format!("no address for `{host}` within {} s", timeout.as_secs()))?
        .map_err(|error| format!("no address for `{host}` ({error})"))?;
    let try_one = |address: &SocketAddr| {
        let left = timeout.checked_sub(began.elapsed()).filter(|left| !left.is_zero())?;
        TcpStream::connect_timeout(address, left).ok()
    };
    match addresses.iter().find_map(try_one) {
        Some(_) => Ok(began.elapsed()),
        None => Err(format!("`{host}` accepts no connection on port {port}")),
    }
}

impl Settings {
    /// Uses only the cache if the Hub is unreachable. Takes at most two seconds, much less than a request with retries.
    /// With a proxy, skips the check.
    #[must_use]
    pub fn offline_if_unreachable(self) -> Self {
        let proxied = PROXIES.iter().any(|name| std::env::var_os(name).is_some_and(|proxy| !proxy.is_empty()));
        // The request itself reports a malformed URL.
        let tried = !self.offline && !proxied && self.check().is_ok();
        let network_error = tried.then(|| connect(&self, Duration::from_secs(2)).err()).flatten();
        Self { offline: self.offline || network_error.is_some(), network_error, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listening_endpoint_is_reachable_and_a_closed_one_is_not() {
        const TIMEOUT: Duration = Duration::from_secs(2);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = |endpoint: &str| {
            let endpoint = endpoint.to_owned();
            connect(&Settings { endpoint, ..Settings::from_vars(|_| None) }, TIMEOUT)
        };
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        at(&endpoint).unwrap();
        drop(listener);
        let began = Instant::now();
        assert!(at(&endpoint).unwrap_err().starts_with("`127.0.0.1` accepts no connection"));
        assert!(at("http://no.such.host.invalid").unwrap_err().contains("no address for `no.such.host.invalid`"));
        assert!(began.elapsed() < 3 * TIMEOUT);
    }
}
