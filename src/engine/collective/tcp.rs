//! The processes of a job on one machine or several, which exchange bytes through TCP connections between each two of
//! them.
//!
//! Rank 0 listens at `MASTER_ADDR` and `MASTER_PORT`, the variables of `torchrun`. The others connect to it, learn each
//! other's addresses from it, and connect to each other.

use super::{JOB_VARIABLE, Job, LOST, LaunchEnv, Master, Place, ProcessGroup};
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepidle};
use rustix::system::uname;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Pause between two attempts to listen or to connect to rank 0, which may start later.
const RETRY: Duration = Duration::from_millis(100);
/// The time that rank 0 waits for a port in use. The port of a connection becomes free a minute after its end.
const PORT_TIME: Duration = Duration::from_secs(70);
/// The time that a new connection has to send the next bytes of its [`Hello`].
const HELLO_TIME: Duration = Duration::from_secs(10);
/// An idle connection is probed after this time. Routers forget idle connections after a few minutes, and two workers
/// exchange nothing while the leader reads data.
const IDLE_TIME: Duration = Duration::from_mins(1);

/// The processes of a job.
#[derive(Debug)]
pub struct Tcp {
    /// The connection to each other process, by rank; `None` for this one.
    streams: Vec<Option<TcpStream>>,
    job: Job,
}

/// The first bytes of a connection: the job, the rank of the sender, and the port at which it listens.
struct Hello {
    job: [u8; 16],
    rank: u32,
    port: u16,
}

impl Hello {
    const BYTES: usize = 22;

    fn send(&self, mut stream: &TcpStream) -> std::io::Result<()> {
        let bytes = [&self.job[..], &self.rank.to_le_bytes(), &self.port.to_le_bytes()].concat();
        stream.write_all(&bytes)
    }

    fn receive(mut stream: &TcpStream, limit: Duration) -> std::io::Result<Self> {
        let mut bytes = [0; Self::BYTES];
        stream.set_read_timeout(Some(limit))?;
        stream.read_exact(&mut bytes)?;
        stream.set_read_timeout(None)?;
        let [job @ .., r0, r1, r2, r3, p0, p1] = bytes;
        Ok(Self { job, rank: u32::from_le_bytes([r0, r1, r2, r3]), port: u16::from_le_bytes([p0, p1]) })
    }
}

/// The address at which a process listens that belongs to the machine which `host` names and has `address` on it. The
/// name of a machine is often a loopback address in its own `/etc/hosts`, which other machines cannot reach.
fn listening_address(host: &str, address: IpAddr) -> IpAddr {
    let stays_here = host == "localhost" || host.parse::<IpAddr>().is_ok();
    match address {
        _ if stays_here || !address.is_loopback() => address,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Connects to the first of `addresses` that answers.
fn connect(addresses: impl ToSocketAddrs) -> io::Result<TcpStream> {
    TcpStream::connect(addresses).and_then(reject_loop)
}

/// Rejects a connection of a port to itself. The kernel makes it if no process listens at a port of this machine, and
/// the connection happens to get this port.
fn reject_loop(stream: TcpStream) -> io::Result<TcpStream> {
    if stream.local_addr()? == stream.peer_addr()? { Err(ErrorKind::ConnectionRefused.into()) } else { Ok(stream) }
}

impl Tcp {
    /// Opens the socket at which rank 0 expects the others. Waits more than a minute for a port in use.
    pub fn listen(master: &Master) -> Result<TcpListener> {
        let deadline = Instant::now() + PORT_TIME;
        let bind = || {
            let mut addresses: Vec<_> = (master.host.as_str(), master.port).to_socket_addrs()?.collect();
            for found in &mut addresses {
                found.set_ip(listening_address(&master.host, found.ip()));
            }
            TcpListener::bind(&addresses[..])
        };
        loop {
            match bind() {
                Ok(listener) => return Ok(listener),
                Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                    std::thread::sleep(RETRY);
                }
                Err(error) => return Err(Error::Collective(format!("cannot listen at `{master}`: {error}"))),
            }
        }
    }

    /// Connects this process to all others of the job. Rank 0 provides its `listener`. `on_timeout` ends the process if
    /// another one sends nothing for the time limit. Fails if a process does not connect within the time limit; the
    /// error names it.
    pub fn connect(
        launch: &LaunchEnv,
        master: &Master,
        listener: Option<TcpListener>,
        on_timeout: fn(&str) -> !,
    ) -> Result<Self> {
        let job = Job::new(launch.rank, on_timeout)?;
        let meeting = Meeting::new(launch, master, job.limit);
        let streams = match listener {
            Some(listener) => meeting.gather(&listener),
            None => meeting.join(),
        }?;
        streams.iter().flatten().try_for_each(configure).map_err(Error::io("configure", "a connection"))?;
        let mut group = Self { streams, job };
        let host = uname().nodename().to_string_lossy().into_owned();
        group.job.places = (&group as &dyn ProcessGroup).all_gather_messages(&Place::on(host))?;
        Ok(group)
    }

    fn lost(&self, rank: usize, error: &std::io::Error) -> Error {
        Error::Collective(format!("{LOST} {}: {error}", self.job.name(rank)))
    }
}

fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, IDLE_TIME)?;
    stream.set_nonblocking(true)
}

/// A job whose processes are not yet connected.
struct Meeting<'a> {
    id: [u8; 16],
    launch: &'a LaunchEnv,
    master: &'a Master,
    deadline: Instant,
}

impl<'a> Meeting<'a> {
    fn new(launch: &'a LaunchEnv, master: &'a Master, limit: Duration) -> Self {
        let mut id = [0; 16];
        id.copy_from_slice(&Sha256::digest(master.job.as_bytes())[..16]);
        Self { id, launch, master, deadline: Instant::now() + limit }
    }

    fn hello(&self, port: u16) -> Hello {
        Hello { job: self.id, rank: self.launch.rank as u32, port }
    }

    /// Rank 0's connections: waits for all others, and sends each the addresses of all.
    fn gather(&self, listener: &TcpListener) -> Result<Vec<Option<TcpStream>>> {
        let mut streams: Vec<_> = (0..self.launch.world_size).map(|_| None).collect();
        let mut addresses = vec![SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)); self.launch.world_size];
        self.accept(listener, &mut streams, |rank, address| addresses[rank] = address)?;
        for mut stream in streams.iter().flatten() {
            serde_json::to_writer(&mut stream, &addresses)
                .map_err(|error| Error::Collective(format!("a process ended during the start: {error}")))?;
        }
        Ok(streams)
    }

    /// Another rank's connections: to rank 0, to the ranks below, and from the ranks above.
    fn join(&self) -> Result<Vec<Option<TcpStream>>> {
        let lost = |error| Error::Collective(format!("{LOST} `{}`: {error}", self.master));
        let first = self.reach_master()?;
        let address = first.local_addr().map_err(lost)?.ip();
        let listener = TcpListener::bind((listening_address(&self.master.host, address), 0)).map_err(lost)?;
        let hello = self.hello(listener.local_addr().map_err(lost)?.port());
        hello.send(&first).map_err(lost)?;
        first.set_read_timeout(Some(self.remaining())).map_err(lost)?;
        let mut addresses = serde_json::Deserializer::from_reader(&first);
        let addresses =
            Vec::<SocketAddr>::deserialize(&mut addresses).map_err(|error| match io::Error::from(error) {
                late if late.kind() == ErrorKind::WouldBlock => {
                    Error::Collective(format!("not all processes connected to `{}` in time", self.master))
                }
                error => lost(error),
            })?;
        first.set_read_timeout(None).map_err(lost)?;
        let master = first.peer_addr().map_err(lost)?.ip();
        let mut streams: Vec<_> = (0..self.launch.world_size).map(|_| None).collect();
        streams[0] = Some(first);
        for (rank, mut address) in addresses.into_iter().enumerate().take(self.launch.rank).skip(1) {
            if address.ip().is_loopback() {
                // A process on the machine of rank 0.
                address.set_ip(master);
            }
            let stream = connect(address).and_then(|stream| hello.send(&stream).map(|()| stream));
            let failed = |error| Error::Collective(format!("process {rank} cannot be reached at {address}: {error}"));
            streams[rank] = Some(stream.map_err(failed)?);
        }
        self.accept(&listener, &mut streams, |_, _| ())?;
        Ok(streams)
    }

    /// A connection to rank 0, as soon as it listens. If rank 0 has started this process, it listens until it ends.
    fn reach_master(&self) -> Result<TcpStream> {
        let may_listen_later = std::env::var_os(JOB_VARIABLE).is_none();
        loop {
            match connect((self.master.host.as_str(), self.master.port)) {
                Ok(stream) => return Ok(stream),
                Err(_) if may_listen_later && Instant::now() < self.deadline => std::thread::sleep(RETRY),
                Err(error) => {
                    return Err(Error::Collective(format!(
                        "process 0 cannot be reached at `{}`: {error}",
                        self.master
                    )));
                }
            }
        }
    }

    /// Waits for connections of all ranks above this one. Ignores those of strangers.
    fn accept(
        &self,
        listener: &TcpListener,
        streams: &mut [Option<TcpStream>],
        mut on_address: impl FnMut(usize, SocketAddr),
    ) -> Result<()> {
        let failed = Error::io("accept", "a connection");
        while let Some(missing) = (self.launch.rank + 1..streams.len()).find(|rank| streams[*rank].is_none()) {
            match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&timespec(self.remaining()))) {
                Ok(0) => {
                    let own = self.launch.rank;
                    let address = listener.local_addr().map_err(failed)?;
                    let message = format!("process {missing} did not connect to process {own} at {address} in time");
                    return Err(Error::Collective(message));
                }
                Ok(_) => {}
                // By a signal.
                Err(_) => continue,
            }
            let (stream, from) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed(error)),
            };
            let Ok(hello) = Hello::receive(&stream, self.remaining().min(HELLO_TIME)) else { continue };
            let rank = hello.rank as usize;
            if hello.job == self.id && streams.get(rank).is_some_and(Option::is_none) && rank > self.launch.rank {
                streams[rank] = Some(stream);
                on_address(rank, SocketAddr::new(from.ip().to_canonical(), hello.port));
            }
        }
        Ok(())
    }

    fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}

/// The remaining bytes of one pair of processes in an exchange.
struct Transfer<'a> {
    rank: usize,
    stream: &'a TcpStream,
    unsent: &'a [u8],
    missing: &'a mut [u8],
}

impl Transfer<'_> {
    fn is_done(&self) -> bool {
        self.unsent.is_empty() && self.missing.is_empty()
    }

    /// Moves as many bytes as possible without waiting; returns their number.
    fn advance(&mut self) -> std::io::Result<usize> {
        let mut moved = 0;
        if !self.unsent.is_empty() {
            let sent = ready(self.stream.write(self.unsent))?;
            self.unsent = &self.unsent[sent..];
            moved += sent;
        }
        if !self.missing.is_empty() {
            let received = ready(self.stream.read(self.missing))?;
            self.missing = &mut std::mem::take(&mut self.missing)[received..];
            moved += received;
        }
        Ok(moved)
    }

    fn interest(&self) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::OUT, !self.unsent.is_empty());
        flags.set(PollFlags::IN, !self.missing.is_empty());
        flags
    }
}

/// The bytes of a call that may have to wait: 0 if it has to. The end of a stream is an error.
fn ready(result: std::io::Result<usize>) -> std::io::Result<usize> {
    match result {
        Ok(0) => Err(std::io::Error::new(ErrorKind::UnexpectedEof, "it has ended")),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        result => result,
    }
}

impl ProcessGroup for Tcp {
    fn rank(&self) -> usize {
        self.job.rank
    }

    fn world_size(&self) -> usize {
        self.streams.len()
    }

    fn job(&self) -> Option<&Job> {
        Some(&self.job)
    }

    fn check_peers(&self) -> Result<()> {
        let peers = self.streams.iter().enumerate().filter_map(|(rank, stream)| Some((rank, stream.as_ref()?)));
        peers.into_iter().try_for_each(|(rank, stream)| {
            ready(stream.peek(&mut [0])).map(drop).map_err(|error| self.lost(rank, &error))
        })
    }

    fn all_to_all(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<()> {
        let began = Instant::now();
        let mut transfers = Vec::new();
        for ((rank, stream), (unsent, missing)) in self.streams.iter().enumerate().zip(out.iter().zip(into)) {
            if let Some(stream) = stream {
                transfers.push(Transfer { rank, stream, unsent, missing });
            }
        }
        let mut moved_at = Instant::now();
        loop {
            transfers.retain(|transfer| !transfer.is_done());
            let Some(first) = transfers.first().map(|transfer| transfer.rank) else { break };
            let mut moved = 0;
            for transfer in &mut transfers {
                moved += transfer.advance().map_err(|error| self.lost(transfer.rank, &error))?;
            }
            if moved > 0 {
                moved_at = Instant::now();
                continue;
            }
            self.job.check_silence(moved_at, first);
            let mut waits: Vec<_> = transfers.iter().map(|it| PollFd::new(it.stream, it.interest())).collect();
            // An interrupted wait is repeated.
            poll(&mut waits, Some(&timespec(Duration::from_secs(1)))).ok();
        }
        self.job.add_comm_time(began);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::{socket_keepalive, tcp_keepidle};
    use std::net::UdpSocket;
    use std::os::fd::FromRawFd;
    use std::thread;

    fn listen(host: &str) -> (Master, TcpListener) {
        let mut master = Master { host: host.into(), port: 0, job: "a".into() };
        let listener = Tcp::listen(&master).unwrap();
        master.port = listener.local_addr().unwrap().port();
        (master, listener)
    }

    #[test]
    fn a_port_in_use_is_waited_for() {
        let user = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = user.local_addr().unwrap().port();
        let ends = thread::spawn(move || {
            thread::sleep(3 * RETRY);
            drop(user);
        });
        let master = Master { host: "127.0.0.1".into(), port, job: String::new() };
        assert_eq!(Tcp::listen(&master).unwrap().local_addr().unwrap().port(), port);
        ends.join().unwrap();
    }

    fn launch(world_size: usize, rank: usize) -> LaunchEnv {
        LaunchEnv { variable: "", world_size, rank, master: None }
    }

    #[test]
    fn a_connection_of_a_port_to_itself_is_rejected() {
        // The standard library cannot choose the port that it connects from.
        // SAFETY: the address is plain numbers, and the socket has no other owner.
        let stream = unsafe {
            let mut address: libc::sockaddr_in = std::mem::zeroed();
            address.sin_family = libc::AF_INET as _;
            address.sin_addr.s_addr = u32::from(Ipv4Addr::LOCALHOST).to_be();
            let socket = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
            let place = (&raw mut address).cast();
            let mut size = size_of_val(&address) as libc::socklen_t;
            assert_eq!(libc::bind(socket, place, size), 0);
            assert_eq!(libc::getsockname(socket, place, &raw mut size), 0);
            assert_eq!(libc::connect(socket, place, size), 0);
            TcpStream::from_raw_fd(socket)
        };
        assert_eq!(reject_loop(stream).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        connect(listener.local_addr().unwrap()).unwrap();
    }

    #[test]
    fn the_loopback_address_of_a_name_is_not_listened_at() {
        for (host, address, listened_at) in [
            ("node1", "127.0.1.1", "0.0.0.0"),
            ("node1", "::1", "::"),
            ("node1", "10.0.0.7", "10.0.0.7"),
            ("localhost", "127.0.0.1", "127.0.0.1"),
            ("127.0.1.1", "127.0.1.1", "127.0.1.1"),
            ("::1", "::1", "::1"),
        ] {
            assert_eq!(listening_address(host, address.parse().unwrap()), listened_at.parse::<IpAddr>().unwrap());
        }
    }

    #[test]
    fn processes_of_other_machines_reach_those_that_know_rank_0_by_a_loopback_address() {
        // The address that other machines know, if there is one.
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let outside = socket.connect(("192.0.2.1", 9)).and_then(|()| socket.local_addr());
        let outside = outside.map_or("127.0.0.1".to_owned(), |address| address.ip().to_string());
        // A name of this machine with a loopback address, as `127.0.1.1 node1` in `/etc/hosts`.
        let (master, listener) = listen("LOCALHOST");
        assert!(listener.local_addr().unwrap().ip().is_unspecified());
        let from_outside = Master { host: outside, ..master.clone() };
        let mut listener = Some(listener);
        thread::scope(|scope| {
            let all = [&master, &master, &from_outside].into_iter().enumerate().map(|(rank, master)| {
                let listener = listener.take();
                scope.spawn(move || Tcp::connect(&launch(3, rank), master, listener, |message| panic!("{message}")))
            });
            all.collect::<Vec<_>>().into_iter().for_each(|one| drop(one.join().unwrap().unwrap()));
        });
    }

    #[test]
    fn processes_that_do_not_connect_in_time_are_named() {
        let (master, listener) = listen("127.0.0.1");
        let limit = Duration::from_millis(100);
        let error = Meeting::new(&launch(3, 0), &master, limit).gather(&listener).unwrap_err().to_string();
        assert_eq!(error, format!("process 1 did not connect to process 0 at {master} in time"));
        let error = Meeting::new(&launch(2, 1), &master, limit).join().unwrap_err().to_string();
        assert_eq!(error, format!("not all processes connected to `{master}` in time"));
    }

    /// For example a scanner of ports.
    #[test]
    fn a_stranger_that_sends_nothing_does_not_delay_the_deadline() {
        let (master, listener) = listen("127.0.0.1");
        let stranger = TcpStream::connect(("127.0.0.1", master.port)).unwrap();
        let patience = Duration::from_secs(2);
        let ends = thread::spawn(move || {
            thread::sleep(patience);
            drop(stranger);
        });
        let began = Instant::now();
        let error = Meeting::new(&launch(2, 0), &master, Duration::from_millis(100)).gather(&listener).unwrap_err();
        assert!(error.to_string().starts_with("process 1 did not connect"), "{error}");
        assert!(began.elapsed() < patience, "{:?}", began.elapsed());
        ends.join().unwrap();
    }

    #[test]
    fn the_first_connection_of_each_higher_rank_counts() {
        let (master, listener) = listen("127.0.0.1");
        let launch = launch(3, 0);
        let meeting = Meeting::new(&launch, &master, HELLO_TIME);
        let connections = [1, 1, 0, 3, 2].map(|rank| {
            let stream = TcpStream::connect(("127.0.0.1", master.port)).unwrap();
            Hello { rank, ..meeting.hello(7) }.send(&stream).unwrap();
            stream
        });
        let streams = meeting.gather(&listener).unwrap();
        assert!(streams[0].is_none());
        for (stream, connection) in streams[1..].iter().zip([&connections[0], &connections[4]]) {
            assert_eq!(stream.as_ref().unwrap().peer_addr().unwrap(), connection.local_addr().unwrap());
        }
    }

    /// Its error is the cause; those of the others only hide it.
    #[test]
    fn a_leader_that_ends_during_the_start_is_a_lost_connection() {
        let (master, listener) = listen("127.0.0.1");
        thread::scope(|scope| {
            scope.spawn(|| listener.accept().map(drop).unwrap());
            let error = Meeting::new(&launch(2, 1), &master, HELLO_TIME).join().unwrap_err().to_string();
            assert!(error.starts_with(&format!("lost connection to `{master}`: ")), "{error}");
        });
    }

    /// A slow connection is not a lost one.
    #[test]
    fn only_silence_ends_an_exchange() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut other = connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        configure(&stream).unwrap();
        let mut job = Job::new(0, |message| panic!("{message}")).unwrap();
        job.limit = Duration::from_secs(1);
        let pause = job.limit / 2;
        let group = Tcp { streams: vec![None, Some(stream)], job };
        let receive = |bytes| (&group as &dyn ProcessGroup).receive(1, &mut vec![0; bytes]).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..4 {
                    thread::sleep(pause);
                    other.write_all(&[1]).unwrap();
                }
            });
            receive(4);
            let ended = scope.spawn(|| receive(1)).join().unwrap_err();
            let message = ended.downcast::<String>().unwrap();
            assert!(message.starts_with("no message from process 1 for 1 s; aborting the job"), "{message}");
        });
    }

    #[test]
    fn processes_exchange_bytes_and_notice_an_end() {
        const BIG: usize = 3 << 20;
        let (master, listener) = listen("127.0.0.1");
        // Strangers: one of another job, one with another protocol, one that leaves.
        let of_other_job = [&[7; 16][..], &1u32.to_le_bytes(), &7u16.to_le_bytes()].concat();
        let strangers = [&of_other_job[..], b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b""];
        let strangers = strangers.map(|bytes| {
            let mut stream = TcpStream::connect(("127.0.0.1", master.port)).unwrap();
            stream.write_all(bytes).unwrap();
            stream
        });
        drop(strangers);
        let mut listener = Some(listener);
        let connected = thread::scope(|scope| {
            let all = [0, 1, 2].map(|rank| {
                let master = &master;
                let listener = listener.take();
                let connect =
                    move || Tcp::connect(&launch(3, rank), master, listener, |message| panic!("{message}")).unwrap();
                scope.spawn(connect)
            });
            all.map(|one| one.join().unwrap())
        });
        let exchange = |group: &Tcp| {
            let own = vec![group.rank() as u8; BIG];
            let mut into = vec![vec![9; BIG]; 3];
            into[group.rank()].clear();
            let mut slots: Vec<&mut [u8]> = into.iter_mut().map(Vec::as_mut_slice).collect();
            let out: Vec<&[u8]> = (0..3).map(|to| if to == group.rank() { &[][..] } else { &own }).collect();
            group.all_to_all(&out, &mut slots).map(|()| into)
        };
        thread::scope(|scope| {
            for group in &connected {
                scope.spawn(move || {
                    for (rank, bytes) in exchange(group).unwrap().iter().enumerate() {
                        assert!(bytes.iter().all(|byte| usize::from(*byte) == rank));
                    }
                    let group = group as &dyn ProcessGroup;
                    assert_eq!((group.local_world_size(), group.local_rank()), (3, group.rank()));
                    assert_eq!(group.core_sharers(), 3);
                });
            }
            for stream in connected.iter().flat_map(|group| group.streams.iter().flatten()) {
                assert!(socket_keepalive(stream).unwrap() && tcp_keepidle(stream).unwrap() == IDLE_TIME);
            }
        });
        let [first, second, third] = connected;
        first.check_peers().unwrap();
        drop(third);
        let lost = thread::scope(|scope| {
            [&first, &second].map(|group| scope.spawn(move || exchange(group))).map(thread::ScopedJoinHandle::join)
        });
        for error in lost {
            let message = error.unwrap().unwrap_err().to_string();
            assert!(message.starts_with("lost connection to process 2 on `"), "{message}");
        }
        assert!(first.check_peers().unwrap_err().to_string().starts_with("lost connection to process 2 on `"));
    }
}
