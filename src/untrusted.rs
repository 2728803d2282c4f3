//! Untrusted input: files that may be pipes or devices, text that must be escaped before it reaches a terminal, and
//! work that may ruin its process.
//!
//! Text is escaped by the writers, not by the readers: [`SanitizingWriter`] wraps a stream, [`sanitize_line`] and
//! [`sanitize_block`] escape a message.

pub mod subprocess;

use std::borrow::Cow;
use std::fmt::Write as _;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;

/// Opens a regular file for reading. Rejects pipes, devices and sockets, from which reading may never end. Fails with
/// [`ErrorKind::InvalidInput`] for anything but a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    let file = open_any(path)?;
    let metadata = file.metadata()?;
    match () {
        () if metadata.is_file() => Ok(file),
        () if metadata.is_dir() => Err(ErrorKind::IsADirectory.into()),
        () => Err(not_regular()),
    }
}

fn not_regular() -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, "it is a pipe, a device or a socket, not a regular file")
}

/// Opens a file of a run for writing, with `options`. Rejects links and pipes, which an untrusted folder may contain.
/// Fails with [`ErrorKind::InvalidData`] for anything but a regular file.
pub fn open_run_file(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let refused = |what: &str| io::Error::new(ErrorKind::InvalidData, format!("it is {what}; remove it"));
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path).map_err(|error| match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() => refused("a symbolic link, and is not followed"),
        _ => error,
    })?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(refused("not a regular file")) }
}

/// Whether two files are the same.
pub fn same_file(one: &Metadata, other: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Opens without waiting for the other end of a pipe.
fn open_any(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK | libc::O_NOCTTY);
    // A socket, or a device without a driver.
    let is_special = |error: &io::Error| error.raw_os_error() == Some(libc::ENXIO);
    options.open(path).map_err(|error| if is_special(&error) { not_regular() } else { error })
}

/// Whether `path` is a pipe, as `<(command)` is in a shell.
pub fn is_pipe(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| std::os::unix::fs::FileTypeExt::is_fifo(&metadata.file_type()))
}

/// A pipe's reading end. Without a writer it is at its end at once instead of blocking forever.
#[derive(Debug)]
pub struct Pipe(File);

impl Pipe {
    /// Opens the pipe at `path`.
    pub fn open(path: &Path) -> io::Result<Self> {
        open_any(path).map(Self)
    }
}

impl Read for Pipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buffer) {
                // There is a writer that has not written yet.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
                done => return done,
            }
        }
    }
}

/// Whether a character can control a terminal or change the order of displayed text: C0 and C1 control characters, line
/// and paragraph separators, bidirectional marks, embeddings, overrides and isolates.
pub fn is_unsafe_char(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// `text` on one line, with every [unsafe](is_unsafe_char) character escaped like `\u001b`, which JSON and TOML can
/// parse.
pub fn sanitize_line(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// Indents the lines of `text` after the first, so that none can imitate another message, and escapes other unsafe
/// characters.
pub fn sanitize_block(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unsafe_char) {
        return text.into();
    }
    sanitize_lines(text).replace('\n', "\n  ").into()
}

/// Multi-line `text`, such as JSON, with every other [unsafe](is_unsafe_char) character escaped.
pub fn sanitize_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

fn escaped(text: &str, keep: impl Fn(char) -> bool) -> Cow<'_, str> {
    let unwanted = |c: char| is_unsafe_char(c) && !keep(c);
    if !text.contains(unwanted) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if unwanted(c) {
            // All of them are below U+10000, so four digits are enough.
            let _ = write!(out, "\\u{:04x}", c as u32);
        } else {
            out.push(c);
        }
    }
    out.into()
}

/// Writes text to `inner` with [unsafe](is_unsafe_char) characters except line feeds and tabs escaped. Bytes that are
/// not UTF-8 become U+FFFD.
#[derive(Debug)]
pub struct SanitizingWriter<W: Write> {
    inner: W,
    /// The first bytes of an incomplete character.
    rest: Vec<u8>,
}

impl<W: Write> SanitizingWriter<W> {
    /// A writer in front of `inner`.
    pub fn new(inner: W) -> Self {
        Self { inner, rest: Vec::new() }
    }
}

impl<W: Write> Write for SanitizingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut text = std::mem::take(&mut self.rest);
        text.extend_from_slice(bytes);
        let cut = match std::str::from_utf8(&text) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            _ => text.len(),
        };
        self.rest = text.split_off(cut);
        let text = String::from_utf8_lossy(&text);
        self.inner.write_all(sanitize_lines(&text).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAYLOAD: &str = "a\x1b]0;OWNED\x07\u{9b}2J\r\n\u{202e}b\u{7f}\u{2028}\té";

    #[test]
    fn unsafe_characters_are_escaped_and_others_kept() {
        let clean = r"a\u001b]0;OWNED\u0007\u009b2J\u000d\u000a\u202eb\u007f\u2028\u0009é";
        assert_eq!(sanitize_line(PAYLOAD), clean);
        assert_eq!(serde_json::from_str::<String>(&format!("\"{clean}\"")).unwrap(), PAYLOAD);
        assert_eq!(sanitize_block("one\n\terror: two\x1b"), "one\n  \terror: two\\u001b");
        assert_eq!(sanitize_line("naïve 日本語 👩‍👩‍👧"), "naïve 日本語 👩‍👩‍👧");
    }

    #[test]
    fn a_stream_is_cleaned_wherever_it_is_split() {
        for cut in 0..=PAYLOAD.len() {
            let mut out = SanitizingWriter::new(Vec::new());
            out.write_all(&PAYLOAD.as_bytes()[..cut]).unwrap();
            out.write_all(&PAYLOAD.as_bytes()[cut..]).unwrap();
            let text = String::from_utf8(out.inner).unwrap();
            assert_eq!(text, "a\\u001b]0;OWNED\\u0007\\u009b2J\\u000d\n\\u202eb\\u007f\\u2028\té", "cut at {cut}");
        }
    }

    #[test]
    fn pipes_and_devices_do_not_hang() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let socket = folder.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [Path::new("/dev/zero"), Path::new("/dev/full"), &pipe, &socket] {
            assert_eq!(open(path).unwrap_err().kind(), ErrorKind::InvalidInput, "{}", path.display());
        }
        assert_eq!(open(folder.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
        let read = || {
            let mut text = String::new();
            Pipe::open(&pipe).unwrap().read_to_string(&mut text).unwrap();
            text
        };
        assert_eq!(read(), "");
        // The writer closes its end later, and the reader waits for that.
        let mut writer = File::options().read(true).write(true).open(&pipe).unwrap();
        writer.write_all(b"text").unwrap();
        let closing = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(500));
            drop(writer);
        });
        assert_eq!(read(), "text");
        closing.join().unwrap();
    }
}
