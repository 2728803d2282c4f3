//! `events.jsonl`: written by one process, read by any number of others while it grows.
//!
//! The writer appends each record with a single `write` of a whole line, so a killed process loses nothing it has
//! reported and leaves at worst one torn last line, which [`EventLog::open`] cuts off. A line that cannot be written is
//! kept in memory and retried with the next one.
//!
//! A run that is resumed from step k repeats the steps after k. `Started { resumed_from: k }` marks this: earlier lines
//! of steps after k are void. [`read`] drops those lines; a [`Tail`] returns every line, and its reader rewinds at the
//! mark.

mod line;

use super::event::{Event, Record, VERSION};
use crate::{Error, Result, untrusted};
use line::{has_table, may_be, parse, skim, step_of, without_table};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// The append-only log of a run.
#[derive(Debug)]
pub struct EventLog {
    path: PathBuf,
    file: File,
    /// Bytes not written yet: empty between two records unless writing fails. May start in the middle of a line.
    pending: Vec<u8>,
    /// Records dropped because `pending` was full.
    dropped: u64,
    last_seconds: f64,
}

/// Limit on the bytes kept while writing fails. Further records are dropped and counted.
const MAX_PENDING: usize = 4 << 20;

impl EventLog {
    /// Opens the log at `path` to append to it, or creates it. Cuts off a torn last line.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let mut file = untrusted::open_run_file(&path, OpenOptions::new().read(true).append(true).create(true))
            .map_err(Error::io("open the event log", &path))?;
        let last = repair(&mut file).map_err(Error::io("read the end of the event log", &path))?;
        Ok(Self { path, file, pending: Vec::new(), dropped: 0, last_seconds: last.map_or(0.0, |record| record.s) })
    }

    /// The log's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `s` of the last record when the log was opened; 0 in a new log.
    pub fn last_seconds(&self) -> f64 {
        self.last_seconds
    }

    /// Appends a line. Fails if it cannot be written. The line is kept, and the next call retries; see
    /// [`Self::take_dropped`].
    pub fn append(&mut self, record: &Record) -> Result<()> {
        if self.pending.len() > MAX_PENDING {
            self.dropped += 1;
        } else {
            let start = self.pending.len();
            serde_json::to_writer(&mut self.pending, record)
                .map_err(|error| Error::io("write an event to", &self.path)(error.into()))?;
            // JSON escapes C0 only.
            let text = String::from_utf8_lossy(&self.pending[start..]);
            if let std::borrow::Cow::Owned(clean) = untrusted::sanitize_line(&text) {
                self.pending.truncate(start);
                self.pending.extend_from_slice(clean.as_bytes());
            }
            self.pending.push(b'\n');
        }
        self.write_pending().map_err(Error::io("write an event to", &self.path))
    }

    /// Whether the log's path leads to another file now, or to none.
    pub fn is_detached(&self) -> bool {
        match (self.file.metadata(), self.path.metadata()) {
            (Ok(open), Ok(named)) => !untrusted::same_file(&open, &named),
            (_, named) => named.is_err_and(|error| error.kind() == ErrorKind::NotFound),
        }
    }

    /// Swaps the log's file, so that a test can make writes fail.
    #[cfg(test)]
    pub(super) fn write_to(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    fn write_pending(&mut self) -> std::io::Result<()> {
        let mut written = 0;
        let result = loop {
            match self.file.write(&self.pending[written..]) {
                Ok(0) => break Err(ErrorKind::WriteZero.into()),
                Ok(n) => written += n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
            if written == self.pending.len() {
                break Ok(());
            }
        };
        self.pending.drain(..written);
        result
    }

    /// Records dropped since the last call, because writing failed for too long.
    pub fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }
}

/// Longer lines are not records and are skipped.
const MAX_LINE: u64 = 16 << 20;

/// The last `window` bytes of a file, or more if they hold no whole line, and the position of the first.
fn read_end(file: &mut File, mut window: u64) -> std::io::Result<(u64, Vec<u8>)> {
    let len = file.metadata()?.len();
    loop {
        let start = len.saturating_sub(window);
        let mut end = Vec::new();
        file.seek(SeekFrom::Start(start))?;
        file.read_to_end(&mut end)?;
        if start == 0 || window >= MAX_LINE || end.iter().rev().filter(|&&byte| byte == b'\n').nth(1).is_some() {
            return Ok((start, end));
        }
        window *= 4;
    }
}

/// Repairs a torn last line, and returns the last readable record.
fn repair(file: &mut File) -> std::io::Result<Option<Record>> {
    // A line with its tables takes 10 kB to some 100 kB.
    let (start, end) = read_end(file, 1 << 18)?;
    let whole = end.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let torn = &end[whole..];
    let record = serde_json::from_slice(torn).ok();
    // A kill does not cause a line that is longer than the window; earlier ones may still be readable.
    if record.is_some() || (whole == 0 && start > 0) {
        file.write_all(b"\n")?;
    } else if !torn.is_empty() {
        file.set_len(start + whole as u64)?;
    }
    let mut earlier = end[..whole].rsplit(|&byte| byte == b'\n');
    Ok(record.or_else(|| earlier.find_map(|line| serde_json::from_slice(line).ok())))
}

/// The records in the last `bytes` of a log, the newest first, or the last one if it is longer; none if it cannot be
/// read.
pub fn last_records(log: &Path, bytes: u64) -> impl Iterator<Item = Record> {
    let (_, end) = untrusted::open(log).and_then(|mut file| read_end(&mut file, bytes)).unwrap_or_default();
    let lines: Vec<Vec<u8>> = end.rsplit(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
    lines.into_iter().filter_map(|line| parse(&line))
}

/// The valid records of a log, without those that a later resume made void and without unreadable lines.
pub fn read(path: impl AsRef<Path>) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for_each(path, Detail::Full, |record| {
        records.push(record);
        Ok(())
    })?;
    Ok(records)
}

/// Passes each record of [`read`] to `take`, in memory that does not grow with the log, and returns the number of
/// unreadable lines. Fails if there is no such file, it cannot be read, or `take` fails.
pub fn for_each(path: impl AsRef<Path>, detail: Detail, mut take: impl FnMut(Record) -> Result<()>) -> Result<usize> {
    let path = path.as_ref();
    untrusted::open(path).map_err(Error::io("read", path))?;
    // `cuts[i]`: the last step that later resumes leave valid among the records after start `i`.
    let mut cuts = Vec::new();
    Tail::new(path).with(Detail::Kind("started")).drain(&mut |record| {
        if let Event::Started(started) = record.event {
            cuts.push(started.resumed_from.unwrap_or(u64::MAX));
        }
        Ok(true)
    })?;
    for at in (1..cuts.len()).rev() {
        cuts[at - 1] = cuts[at - 1].min(cuts[at]);
    }
    let mut begun = 0;
    Tail::new(path).with(detail).drain(&mut |record| {
        begun += usize::from(matches!(record.event, Event::Started(_)));
        if begun > cuts.len() {
            // The run was resumed in the meantime.
            return Ok(false);
        }
        let valid = cuts.get(begun).copied().unwrap_or(u64::MAX);
        if record.event.step().is_none_or(|step| step <= valid) {
            take(record)?;
        }
        Ok(true)
    })
}

/// The result of reading from a log.
#[derive(Debug, Default)]
pub struct Poll {
    /// New records, in the order they were written.
    pub records: Vec<Record>,
    /// New whole lines that could not be parsed.
    pub unreadable: usize,
    /// Whether the file already holds more whole lines.
    pub more: bool,
}

/// The part of a log that is read in full; everything else is much faster to read. The last megabytes always are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Detail {
    /// Everything.
    #[default]
    Full,
    /// Everything except most of the steps' tensor tables.
    FewTables,
    /// Like [`Self::FewTables`], and only the leading fields of steps, up to
    /// [`StepRecord::skipped`](super::StepRecord::skipped).
    Leading,
    /// Everything except the steps outside of this range, also in the last megabytes.
    Steps(RangeInclusive<u64>),
    /// Only the records of this kind, also in the last megabytes.
    Kind(&'static str),
}

/// A reader that follows a log as it grows.
///
/// It reads only whole lines. If the file is truncated or replaced in place, it starts over; if it is renamed and a new
/// one appears under its name, it reads the old one to its end first. A log that does not exist yet reads as empty.
#[derive(Debug, Default)]
pub struct Tail {
    path: PathBuf,
    file: Option<File>,
    /// The first bytes of the file, to detect that it was replaced.
    head: Vec<u8>,
    /// End of the last whole line read.
    offset: u64,
    detail: Detail,
    /// End of the last line with the table of tensors that was read in full.
    table: u64,
}

/// Maximum bytes per poll, so that a screen can draw in between.
const CHUNK: usize = 4 << 20;
/// Number of first bytes that identify a log; they include the time its first line was written.
const HEAD: u64 = 96;
/// Approximate number of tensor tables read from a long log: more than a chart can show, at 10 kB each.
const TABLES: u64 = 1000;

impl Tail {
    /// A reader at the start of the log at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), ..Self::default() }
    }

    /// Reads only a part of the log.
    #[must_use]
    pub fn with(mut self, detail: Detail) -> Self {
        self.detail = detail;
        self
    }

    /// The path of the log.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the lines written since the last poll, or the first of them.
    pub fn poll(&mut self) -> Result<Poll> {
        self.try_poll().map_err(Error::io("read", &self.path))
    }

    /// Reads to the end, or until `take` returns `false`, and returns the number of unreadable lines.
    pub(crate) fn drain(&mut self, take: &mut dyn FnMut(Record) -> Result<bool>) -> Result<usize> {
        let mut unreadable = 0;
        loop {
            let poll = self.poll()?;
            unreadable += poll.unreadable;
            for record in poll.records {
                if !take(record)? {
                    return Ok(unreadable);
                }
            }
            if !poll.more {
                return Ok(unreadable);
            }
        }
    }

    fn try_poll(&mut self) -> std::io::Result<Poll> {
        if self.file.is_none()
            && let Some(file) = self.named()?
        {
            self.follow(file);
        }
        let Some(file) = self.file.take() else { return Ok(Poll::default()) };
        let poll = self.take_lines(&file);
        self.file = Some(file);
        let mut poll = poll?;
        if !poll.more
            && let Some(successor) = self.successor()?
        {
            // The old file is read to its end and gets no more lines.
            self.follow(successor);
            poll.more = true;
        }
        Ok(poll)
    }

    fn follow(&mut self, file: File) {
        self.file = Some(file);
        self.head.clear();
        self.offset = 0;
        self.table = 0;
    }

    /// The new file at the path, if the file was replaced.
    fn successor(&self) -> std::io::Result<Option<File>> {
        let (Some(current), Some(named)) = (&self.file, self.named()?) else { return Ok(None) };
        Ok((!untrusted::same_file(&current.metadata()?, &named.metadata()?)).then_some(named))
    }

    /// The file at the path; `None` if there is none.
    fn named(&self) -> std::io::Result<Option<File>> {
        match untrusted::open(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn take_lines(&mut self, mut file: &File) -> std::io::Result<Poll> {
        let mut len = file.metadata()?.len();
        if len == self.offset {
            return Ok(Poll::default());
        }
        let mut head = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.take(HEAD).read_to_end(&mut head)?;
        if len < self.offset || !head.starts_with(&self.head) {
            self.offset = 0;
            self.table = 0;
            len = file.metadata()?.len();
        }
        check_version(&head)?;
        self.head = head;

        let mut bytes = Vec::new();
        let mut chunk = CHUNK;
        let whole = loop {
            file.seek(SeekFrom::Start(self.offset))?;
            bytes.clear();
            file.take(chunk as u64).read_to_end(&mut bytes)?;
            match bytes.iter().rposition(|&byte| byte == b'\n') {
                Some(at) => break at + 1,
                None if bytes.len() < chunk => return Ok(Poll::default()),
                None if chunk as u64 >= MAX_LINE => break chunk,
                None => chunk *= 2,
            }
        };
        let mut at = self.offset;
        self.offset += whole as u64;
        let distant = len.saturating_sub(self.offset) > CHUNK as u64;
        let mut poll = Poll { more: bytes.len() == chunk, ..Poll::default() };
        for line in bytes[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
            at += line.len() as u64 + 1;
            match &self.detail {
                Detail::Kind(kind) if !may_be(kind, line) => continue,
                Detail::Steps(steps) if step_of(line).is_some_and(|step| !steps.contains(&step)) => continue,
                _ => {}
            }
            let wanted = has_table(line) && at - self.table > len / TABLES;
            if wanted {
                self.table = at;
            }
            let part = match self.detail {
                Detail::FewTables if distant && !wanted => without_table(line).and_then(|line| parse(line.as_bytes())),
                Detail::Leading if distant && !wanted => skim(line),
                _ => None,
            };
            match part.or_else(|| parse(line)) {
                Some(record) => poll.records.push(record),
                None => poll.unreadable += 1,
            }
        }
        Ok(poll)
    }
}

/// Rejects a log with a different format version, which its first bytes contain.
fn check_version(head: &[u8]) -> std::io::Result<()> {
    let version = head.strip_prefix(b"{\"v\":").and_then(|rest| rest.split(|&byte| byte == b',').next());
    match version.and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<u32>().ok()) {
        Some(version) if version != VERSION => {
            let tip = if version > VERSION { "update the program" } else { "repeat the run" };
            let message = format!("its format is version {version}, but this program reads version {VERSION}; {tip}");
            Err(std::io::Error::new(ErrorKind::InvalidData, message))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::{GradStats, Started, StepRecord, TensorRecord, UnderflowOnset};
    use super::*;

    fn step(step: u64, loss: f32) -> Record {
        let grads = GradStats { min_abs: Some(6e-8), exponents: vec![(-24, 1)], ..Default::default() };
        let record = StepRecord { step, loss, loss_scale: 65536.0, grads, ..StepRecord::default() };
        Record { v: VERSION, t: 1_700_000_000_000, s: step as f64 / 8.0, event: Event::Step(Box::new(record)) }
    }

    fn with_table(number: u64, tensors: usize) -> Record {
        let mut record = step(number, 1.0);
        let Event::Step(inner) = &mut record.event else { panic!("not a step") };
        inner.tensors = vec![TensorRecord::default(); tensors];
        record
    }

    fn started(resumed_from: Option<u64>) -> Record {
        let started = Started { resumed_from, ..Started::default() };
        Record { v: VERSION, t: 0, s: 0.0, event: Event::Started(Box::new(started)) }
    }

    fn steps(records: &[Record]) -> Vec<u64> {
        records.iter().filter_map(|record| record.event.step()).collect()
    }

    fn log_file() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        (folder, path)
    }

    fn all(tail: &mut Tail) -> Vec<Record> {
        let mut found = Vec::new();
        let take = &mut |record| {
            found.push(record);
            Ok(true)
        };
        tail.drain(take).unwrap();
        found
    }

    fn line(record: &Record) -> String {
        serde_json::to_string(record).unwrap() + "\n"
    }

    fn write(path: &Path, text: &str) {
        OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// A file whose writes fail, as on a full disk.
    fn unwritable(path: &Path) -> File {
        File::open(path).unwrap()
    }

    #[test]
    fn records_that_could_not_be_written_are_written_later() {
        let (_folder, path) = log_file();
        let mut log = EventLog::open(&path).unwrap();
        log.append(&step(1, 1.0)).unwrap();
        let good = log.write_to(unwritable(&path));
        assert!(log.append(&step(2, 2.0)).is_err() && log.append(&step(3, 3.0)).is_err());
        assert_eq!(steps(&read(&path).unwrap()), [1]);
        // Half of a line was written before the disk was full.
        log.file = good;
        log.file.write_all(&log.pending.drain(..40).collect::<Vec<u8>>()).unwrap();
        log.append(&step(4, 4.0)).unwrap();
        assert_eq!(steps(&read(&path).unwrap()), [1, 2, 3, 4]);
        assert_eq!((log.take_dropped(), log.pending.len()), (0, 0));
    }

    #[test]
    fn a_long_write_failure_drops_records_and_bounds_memory() {
        let (_folder, path) = log_file();
        let mut log = EventLog::open(&path).unwrap();
        let good = log.write_to(unwritable(&path));
        let length = line(&step(1, 1.0)).len() as u64;
        let count = 2 * MAX_PENDING as u64 / length;
        (0..count).for_each(|number| assert!(log.append(&step(number, 1.0)).is_err()));
        assert!(log.pending.len() < MAX_PENDING + 4096);
        log.file = good;
        log.append(&step(count, 1.0)).unwrap_or_default();
        log.append(&step(count + 1, 1.0)).unwrap();
        let dropped = log.take_dropped();
        assert!(dropped > count / 3, "{dropped} of {count}");
        assert_eq!(read(&path).unwrap().len() as u64 + dropped, count + 2);
    }

    #[test]
    fn no_control_character_is_written() {
        let (_folder, path) = log_file();
        let message = "\u{1b}]0;OWNED\u{7}\u{9b}2J\r\n\u{202e}".to_owned();
        let record = Record { event: Event::Warning(super::super::Diagnostic { step: 1, message }), ..step(1, 1.0) };
        EventLog::open(&path).unwrap().append(&record).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.trim_end().contains(untrusted::is_unsafe_char), "{text:?}");
        assert_eq!(read(&path).unwrap(), [record]);
    }

    #[test]
    fn a_torn_last_line_is_cut_off_at_every_byte() {
        let (_folder, path) = log_file();
        let (first, second) = (line(&step(1, 1.0)), line(&step(2, 2.0)));
        for cut in 0..=second.len() {
            std::fs::write(&path, format!("{first}{}", &second[..cut])).unwrap();
            let mut log = EventLog::open(&path).unwrap();
            log.append(&step(3, 3.0)).unwrap();
            let whole = cut + 1 >= second.len();
            assert_eq!(steps(&read(&path).unwrap()), if whole { vec![1, 2, 3] } else { vec![1, 3] }, "cut at {cut}");
            assert_eq!(log.last_seconds(), if whole { 0.25 } else { 0.125 });
            assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), if whole { 3 } else { 2 });
        }
    }

    #[test]
    fn steps_that_a_resume_repeats_are_void() {
        let (_folder, path) = log_file();
        let mut log = EventLog::open(&path).unwrap();
        for record in [started(None), step(1, 1.0), step(2, 2.0), step(3, 3.0), started(Some(1)), step(2, 2.5)] {
            log.append(&record).unwrap();
        }
        let records = read(&path).unwrap();
        assert_eq!(steps(&records), [1, 2]);
        assert_eq!(records.last(), Some(&step(2, 2.5)));
        // A second resume, from an earlier step, voids more.
        for record in [step(3, 3.5), started(Some(2)), step(3, 4.0), started(Some(1)), step(2, 5.0)] {
            log.append(&record).unwrap();
        }
        let records = read(&path).unwrap();
        assert_eq!(steps(&records), [1, 2]);
        assert_eq!((records.len(), records.last()), (6, Some(&step(2, 5.0))));
    }

    #[test]
    fn a_log_that_does_not_exist_is_an_error_to_read_and_empty_to_follow() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none.jsonl");
        assert!(read(&path).unwrap_err().to_string().contains("none.jsonl"));
        let mut tail = Tail::new(&path);
        assert!(tail.poll().unwrap().records.is_empty());
        write(&path, &line(&step(1, 1.0)));
        assert_eq!(steps(&tail.poll().unwrap().records), [1]);
    }

    #[test]
    fn a_partly_written_line_is_read_once_complete() {
        let (_folder, path) = log_file();
        let mut tail = Tail::new(&path);
        let text = line(&step(1, 1.0));
        for (at, byte) in text.char_indices() {
            write(&path, &byte.to_string());
            let found = tail.poll().unwrap();
            assert_eq!((found.records.len(), found.unreadable), ((at + 1 == text.len()).into(), 0));
        }
    }

    #[test]
    fn a_damaged_line_does_not_affect_other_lines() {
        let (_folder, path) = log_file();
        write(&path, &format!("{}{{\"v\":1,\u{0}\n{}", line(&step(1, 1.0)), line(&step(2, 1.0))));
        let poll = Tail::new(&path).poll().unwrap();
        assert_eq!((steps(&poll.records), poll.unreadable), (vec![1, 2], 1));
        assert_eq!(steps(&read(&path).unwrap()), [1, 2]);
        assert_eq!(for_each(&path, Detail::Full, |_| Ok(())).unwrap(), 1);
    }

    /// A replay would wait for such a record forever.
    #[test]
    fn a_line_without_a_finite_time_is_unreadable() {
        let (_folder, path) = log_file();
        let whole = line(&step(1, 1.0));
        for time in ["\"s\":\"NaN\",", "\"s\":\"inf\",", "\"s\":NaN,", "\"s\":1e999,", ""] {
            let damaged = whole.replacen("\"s\":0.125,", time, 1);
            std::fs::write(&path, format!("{damaged}{}", line(&step(2, 1.0)))).unwrap();
            let poll = Tail::new(&path).poll().unwrap();
            assert_eq!((steps(&poll.records), poll.unreadable), (vec![2], 1), "{damaged}");
            assert_eq!(skim(damaged.trim_end().as_bytes()), None);
        }
    }

    #[test]
    fn a_truncated_and_rewritten_log_is_read_from_its_start() {
        let (_folder, path) = log_file();
        write(&path, &(line(&step(1, 1.0)) + &line(&step(2, 1.0))));
        let mut tail = Tail::new(&path);
        assert_eq!(steps(&tail.poll().unwrap().records), [1, 2]);
        std::fs::write(&path, line(&step(7, 1.0))).unwrap();
        assert_eq!(steps(&tail.poll().unwrap().records), [7]);
        // The file is longer than before, so only its first bytes reveal the change.
        let other = Record { t: 5, ..step(8, 1.0) };
        std::fs::write(&path, line(&other).repeat(3)).unwrap();
        assert_eq!(steps(&tail.poll().unwrap().records), [8, 8, 8]);
    }

    #[test]
    fn a_rotated_log_is_read_to_its_end_first() {
        let (_folder, path) = log_file();
        write(&path, &line(&step(1, 1.0)));
        let mut tail = Tail::new(&path);
        assert_eq!(steps(&tail.poll().unwrap().records), [1]);
        write(&path, &line(&step(2, 1.0)));
        std::fs::rename(&path, path.with_file_name("events.1.jsonl")).unwrap();
        write(&path, &line(&step(3, 1.0)));
        assert_eq!(steps(&all(&mut tail)), [2, 3]);
    }

    #[test]
    fn a_log_of_another_version_is_one_error() {
        let (_folder, path) = log_file();
        for (v, advice) in [(VERSION - 1, "repeat the run"), (VERSION + 1, "update the program")] {
            std::fs::write(&path, line(&Record { v, ..step(1, 1.0) })).unwrap();
            for error in [read(&path).unwrap_err(), Tail::new(&path).poll().unwrap_err()] {
                let expected = format!("its format is version {v}, but this program reads version 2; {advice}");
                assert!(error.to_string().ends_with(&expected), "{error}");
            }
        }
    }

    #[test]
    fn the_last_record_is_found_however_long_it_is() {
        let (_folder, path) = log_file();
        write(&path, &(line(&step(1, 1.0)) + &line(&with_table(2, 100))));
        let steps = |bytes| last_records(&path, bytes).map(|record| record.event.step()).collect::<Vec<_>>();
        assert_eq!([steps(1)[0], steps(1000)[0]], [Some(2); 2]);
        assert_eq!(steps(1 << 20), [Some(2), Some(1)]);
    }

    #[test]
    fn skimming_finds_what_reading_finds() {
        for loss in [1.25, f32::NAN, f32::INFINITY] {
            let record = step(9, loss);
            let skimmed = skim(line(&record).trim_end().as_bytes()).unwrap();
            let Event::Step(found) = &skimmed.event else { panic!("not a step") };
            assert_eq!((found.step, found.loss.to_bits(), found.loss_scale), (9, loss.to_bits(), 65536.0));
            assert_eq!((skimmed.t, skimmed.s), (record.t, record.s));
        }
        assert_eq!(skim(line(&started(None)).trim_end().as_bytes()), None);
        assert!(has_table(line(&with_table(1, 1)).trim_end().as_bytes()));
        assert!(!has_table(line(&step(1, 1.0)).trim_end().as_bytes()));
    }

    #[test]
    fn a_hurried_reader_finds_every_step_of_a_long_log_and_some_of_its_tables() {
        let (_folder, path) = log_file();
        let onset = UnderflowOnset { step: 0, tensors: vec!["wte.weight".into(); 40] };
        let onset = Record { event: Event::UnderflowOnset(onset), ..step(1, 1.0) };
        write(&path, &(line(&onset) + &(1..=2500).map(|number| line(&with_table(number, 40))).collect::<String>()));
        for detail in [Detail::Leading, Detail::FewTables] {
            let mut found = all(&mut Tail::new(&path).with(detail.clone()));
            assert_eq!(found.remove(0), onset, "only a step's table is left out");
            assert_eq!(steps(&found), (1..=2500).collect::<Vec<_>>());
            let has_table = |record: &&Record| matches!(&record.event, Event::Step(step) if !step.tensors.is_empty());
            let tables = found.iter().filter(has_table).count();
            assert!((500..2000).contains(&tables), "{tables}");
            assert!(found.last().as_ref().is_some_and(has_table));
            let bare = found.iter().enumerate().find(|(_, record)| !has_table(record));
            let is_whole = bare.is_some_and(|(at, record)| *record == step(at as u64 + 1, 1.0));
            assert_eq!(is_whole, detail == Detail::FewTables);
        }
        let both = [7, 8].map(|number| with_table(number, 40));
        assert_eq!(all(&mut Tail::new(&path).with(Detail::Steps(7..=8)))[1..], both);
        assert_eq!(all(&mut Tail::new(&path).with(Detail::Kind("started"))), []);
    }
}
