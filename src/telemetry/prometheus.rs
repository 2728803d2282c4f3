//! The newest figures of a run over HTTP, in the text format of Prometheus.

use super::emitter::Sink;
use super::{Event, FinishReason, Record};
use crate::untrusted::is_unsafe_char;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The time limit for a client's request, and again for the answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Clients answered at once; one more is disconnected.
const CLIENTS: usize = 32;
/// After a failed `accept`, for example without a free file descriptor, which would fail again at once.
const PAUSE: Duration = Duration::from_millis(100);
/// Longest accepted request, in bytes.
const REQUEST: usize = 8192;

/// Answers requests until the process ends, each on a separate thread.
#[derive(Debug)]
pub struct Prometheus {
    newest: Arc<Mutex<Newest>>,
}

/// The newest values of [`FIGURES`].
#[derive(Debug, Default, Clone)]
struct Newest {
    run: String,
    values: BTreeMap<&'static str, f64>,
}

/// The exported figures: name, kind, help. One that is not known yet is left out.
const FIGURES: [(&str, &str, &str); 14] = [
    ("running", "gauge", "1 while the run trains, 0 while it is paused and after its end"),
    ("step", "gauge", "Steps attempted"),
    ("total_steps", "gauge", "Steps the run will attempt"),
    ("updates_total", "counter", "Steps applied"),
    ("loss", "gauge", "Loss of the last step, nats"),
    ("validation_loss", "gauge", "Last validation loss, nats"),
    ("loss_scale", "gauge", "Loss scale of the last step"),
    ("overflows_total", "counter", "Steps skipped because gradients were not finite"),
    ("gradient_norm", "gauge", "Global gradient norm, unscaled, before clipping"),
    ("learning_rate", "gauge", "Learning rate of the last step"),
    ("tokens_total", "counter", "Tokens read, also by skipped steps"),
    ("tokens_per_second", "gauge", "Tokens per second over the last steps"),
    ("resident_memory_bytes", "gauge", "Resident memory of the process"),
    ("last_step_timestamp_seconds", "gauge", "Unix time at the end of the last step"),
];

impl Prometheus {
    /// Listens on an address. Fails if it is in use or not permitted.
    pub fn listen(address: SocketAddr) -> Result<Self> {
        let refused = |error: std::io::Error| {
            Error::config("--metrics-port", format!("cannot listen on {address}: {error}; choose a different port"))
        };
        TcpListener::bind(address).and_then(Self::serve).map_err(refused)
    }

    fn serve(listener: TcpListener) -> std::io::Result<Self> {
        let newest = Arc::new(Mutex::new(Newest::default()));
        let shared = Arc::clone(&newest);
        let answer_all = move || {
            for client in listener.incoming() {
                let Ok(client) = client else {
                    thread::sleep(PAUSE);
                    continue;
                };
                // Each client in progress holds one, as do this thread and the run.
                if Arc::strong_count(&shared) >= CLIENTS + 2 {
                    continue;
                }
                let shared = Arc::clone(&shared);
                // A client that misbehaves only loses its connection.
                let _ = thread::Builder::new().name("metrics".into()).spawn(move || answer(client, &shared));
            }
        };
        thread::Builder::new().name("metrics".into()).spawn(answer_all)?;
        Ok(Self { newest })
    }
}

impl Sink for Prometheus {
    fn write(&mut self, record: &Record) -> Result<()> {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        match &record.event {
            Event::Started(started) => {
                newest.run.clone_from(&started.run);
                newest.values.extend([("total_steps", started.total_steps as f64), ("running", 1.0)]);
            }
            Event::Step(step) => {
                newest.values.extend(step.total_steps.map(|total| ("total_steps", total as f64)));
                newest.values.extend([
                    ("step", step.step as f64),
                    ("updates_total", step.updates as f64),
                    ("loss", f64::from(step.loss)),
                    ("loss_scale", f64::from(step.loss_scale)),
                    ("overflows_total", step.skipped as f64),
                    ("gradient_norm", step.grad_norm),
                    ("learning_rate", step.lr),
                    ("tokens_total", step.tokens as f64),
                    ("tokens_per_second", step.tokens_per_s),
                    ("last_step_timestamp_seconds", record.t as f64 / 1000.0),
                ]);
                newest.values.extend(step.rss_bytes.map(|bytes| ("resident_memory_bytes", bytes as f64)));
            }
            Event::Eval(eval) => newest.values.extend([("validation_loss", eval.loss)]),
            Event::Paused { .. } => newest.values.extend([("running", 0.0)]),
            Event::Resumed { .. } => newest.values.extend([("running", 1.0)]),
            Event::Finished(finished) => {
                newest.values.extend([("running", 0.0)]);
                let done = (finished.reason == FinishReason::Done).then_some(("step", finished.step as f64));
                newest.values.extend(done);
            }
            _ => {}
        }
        Ok(())
    }

    fn name(&self) -> &'static str {
        "Prometheus"
    }
}

fn answer(mut client: TcpStream, newest: &Mutex<Newest>) -> std::io::Result<()> {
    let until = Instant::now() + REQUEST_TIMEOUT;
    client.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < REQUEST {
        // A client that sends one byte at a time gets no extra time.
        let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        client.set_read_timeout(Some(left.ok_or(ErrorKind::TimedOut)?))?;
        match client.read(&mut part)? {
            0 => break,
            read => request.extend(&part[..read]),
        }
    }
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let (status, body) = match line.split(|byte| *byte == b' ').take(2).collect::<Vec<_>>()[..] {
        [b"GET", b"/metrics" | b"/"] => ("200 OK", newest.lock().unwrap_or_else(PoisonError::into_inner).text()),
        [b"GET", _] => ("404 Not Found", "the figures are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "GET /metrics\n".to_owned()),
    };
    write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    )
}

impl Newest {
    fn text(&self) -> String {
        let mut out = String::new();
        let run: String = self.run.chars().filter(|c| !is_unsafe_char(*c)).collect();
        let run = run.replace('\\', "\\\\").replace('"', "\\\"");
        for (name, kind, help) in FIGURES {
            let Some(&value) = self.values.get(name) else { continue };
            let value = match value {
                f64::INFINITY => "+Inf".to_owned(),
                f64::NEG_INFINITY => "-Inf".to_owned(),
                value => value.to_string(),
            };
            let _ = write!(
                out,
                "# HELP finetune_{name} {help}.\n# TYPE finetune_{name} {kind}\nfinetune_{name}{{run=\"{run}\"}} {value}\n"
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{Finished, Started, StepRecord, VERSION, Validation};

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    }

    fn serve() -> (Prometheus, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (Prometheus::serve(listener).unwrap(), address)
    }

    #[test]
    fn the_newest_figures_are_served_and_other_requests_rejected() {
        let (mut server, address) = serve();
        let empty = ask(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(empty.starts_with("HTTP/1.1 200 OK\r\n") && empty.ends_with("\r\n\r\n"), "{empty}");
        let started = Started { run: "a\"b\n\u{1b}\u{202e}".into(), total_steps: 600, ..Started::default() };
        let step = StepRecord { step: 7, loss: f32::NAN, loss_scale: 65536.0, skipped: 2, ..StepRecord::default() };
        for (t, event) in [
            (1000, Event::Started(Box::new(started))),
            (2500, Event::Step(Box::new(step))),
            (2600, Event::Eval(Validation { step: 7, loss: 1.5, ..Validation::default() })),
            (2700, Event::Finished(Finished { step: 7, ..Finished::default() })),
        ] {
            server.write(&Record { v: VERSION, t, s: 0.0, event }).unwrap();
        }
        let text = ask(address, "GET /metrics HTTP/1.1\r\n\r\n");
        for line in [
            "finetune_running{run=\"a\\\"b\"} 0\n",
            "finetune_step{run=\"a\\\"b\"} 7\n",
            "finetune_total_steps{run=\"a\\\"b\"} 600\n",
            "finetune_loss{run=\"a\\\"b\"} NaN\n",
            "finetune_loss_scale{run=\"a\\\"b\"} 65536\n",
            "# TYPE finetune_overflows_total counter\nfinetune_overflows_total{run=\"a\\\"b\"} 2\n",
            "finetune_validation_loss{run=\"a\\\"b\"} 1.5\n",
            "finetune_last_step_timestamp_seconds{run=\"a\\\"b\"} 2.5\n",
        ] {
            assert!(text.contains(line), "{line} is not in {text}");
        }
        assert!(ask(address, "GET /other HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask(address, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert_eq!(Prometheus::listen(address).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn clients_that_dawdle_send_garbage_or_come_in_thousands_keep_none_waiting() {
        let (server, address) = serve();
        let garbage = |bytes: &[u8]| {
            let mut client = TcpStream::connect(address).unwrap();
            let _ = client.write_all(bytes);
            let mut answer = Vec::new();
            let _ = client.read_to_end(&mut answer);
            String::from_utf8(answer).unwrap()
        };
        assert!(garbage(b"\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert!(garbage(b"\xFF\0\x1B[2J\r\n\r\n").starts_with("HTTP/1.1 405"));
        garbage(&[b'x'; REQUEST + 1]);
        // Many clients send nothing. Those beyond the limit are disconnected at once, the others after the timeout.
        let mut idle: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
        let began = Instant::now();
        let mut slow = idle.pop().unwrap();
        let closed = |client: &mut TcpStream| {
            client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            assert!(!client.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "still open");
        };
        // One client sends a byte at a time.
        let _ = (0..6).try_for_each(|_| {
            thread::sleep(REQUEST_TIMEOUT / 4);
            slow.write_all(b"G")
        });
        idle.iter_mut().for_each(closed);
        closed(&mut slow);
        assert!(began.elapsed() < REQUEST_TIMEOUT * 4, "{:?}", began.elapsed());
        assert!(ask(address, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
        // The thread of the last one ends just after its answer.
        let freed = (0..1000).any(|_| {
            thread::sleep(REQUEST_TIMEOUT / 500);
            Arc::strong_count(&server.newest) == 2
        });
        assert!(freed, "a client is held");
    }
}
