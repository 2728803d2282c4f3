//! What `--data` names, and how it becomes training and validation tokens.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use sha2::{Digest, Sha256};

use super::grammar;
use super::tokenizer::{Tokenizer, hex};
use super::tokens::TokenSource;
use crate::{Error, Result};

/// The share of a corpus that trains; the rest, its contiguous tail, validates.
const TRAIN_PERCENT: usize = 90;

/// The grammar's sentences do not depend on the run's seed, so that runs with different seeds can be compared.
const GRAMMAR_SEED: u64 = 0;

/// Where text comes from: the value of `--data` or `--val`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `grammar`: the built-in corpus of known entropy.
    Grammar,
    /// A UTF-8 text file.
    Text(PathBuf),
}

impl FromStr for Source {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "grammar" => Ok(Self::Grammar),
            "" => Err(Error::config("--data", "must not be empty; give `grammar` or a `.txt` file")),
            path => Ok(Self::Text(path.into())),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Grammar => f.write_str("grammar"),
            Self::Text(path) => path.display().fmt(f),
        }
    }
}

/// Tokens to train and to validate on.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// What a run learns from.
    pub train: TokenSource,
    /// What it is measured on; no token is in both.
    pub validation: TokenSource,
    /// Bytes of text behind each token on average: turns a loss in nats per token into bits per byte.
    pub bytes_per_token: f64,
    /// The least loss attainable in nats per token, where that is known.
    pub entropy_per_token: Option<f64>,
    /// SHA-256 over tokenizer and text in hexadecimal; a resumed run must find the same.
    pub fingerprint: String,
}

impl Dataset {
    /// Reads and tokenises `source`; validation is `validation`, or the last tenth of the tokens without one.
    pub fn load(source: &Source, validation: Option<&Source>, tokenizer: &Tokenizer) -> Result<Self> {
        let mut hash = Sha256::new();
        hash.update(tokenizer.json());
        let mut encode = |source: &Source| -> Result<(TokenSource, usize)> {
            let text = source.read()?;
            hash.update(text.as_bytes());
            // A boundary that no text can contain: moving text between the two sources changes the hash.
            hash.update([0xFF]);
            Ok((TokenSource::from_ids(tokenizer.encode(&text)?), text.len()))
        };
        let (tokens, bytes) = encode(source)?;
        let bytes_per_token = bytes as f64 / tokens.len().max(1) as f64;
        let (train, validation) = match validation {
            Some(validation) => (tokens, encode(validation)?.0),
            None => tokens.split_at(tokens.len() * TRAIN_PERCENT / 100),
        };
        let entropy_per_token = (*source == Source::Grammar && tokenizer.is_byte()).then(grammar::entropy_per_token);
        Ok(Self { train, validation, bytes_per_token, entropy_per_token, fingerprint: hex(&hash.finalize()) })
    }
}

impl Source {
    /// The whole text.
    fn read(&self) -> Result<String> {
        match self {
            Self::Grammar => Ok(grammar::text(GRAMMAR_SEED, grammar::CORPUS_BYTES)),
            Self::Text(path) => read_text(path),
        }
    }
}

/// Reads a file that must hold UTF-8 and something else than white space.
fn read_text(path: &Path) -> Result<String> {
    let origin = path.display();
    let bytes = std::fs::read(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Error::data(&origin, "there is no such file; `--data` takes `grammar` or the path of a text file")
        }
        std::io::ErrorKind::IsADirectory => Error::data(&origin, "is a folder; `--data` takes a text file"),
        _ => Error::io("read", path)(error),
    })?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let position = error.utf8_error().valid_up_to();
        let line = error.as_bytes()[..position].split(|&byte| byte == b'\n').count();
        let byte = error.as_bytes()[position];
        Error::data(
            &origin,
            format!("not UTF-8: byte {position} (line {line}) is 0x{byte:02X}; convert the file first"),
        )
    })?;
    if text.trim().is_empty() {
        return Err(Error::data(&origin, "holds no text"));
    }
    Ok(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> (tempfile::TempDir, Source) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text.txt");
        std::fs::write(&path, bytes).unwrap();
        (folder, Source::Text(path))
    }

    fn ids(tokens: &TokenSource) -> Vec<u32> {
        let mut out = vec![0; tokens.len()];
        tokens.read(0, &mut out);
        out
    }

    #[test]
    fn sources_round_trip_as_text() {
        for text in ["grammar", "some/file.txt"] {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), text);
        }
        assert!("".parse::<Source>().is_err());
    }

    #[test]
    fn the_tail_validates() {
        let (_folder, source) = file(b"0123456789abcdefghij");
        let data = Dataset::load(&source, None, &Tokenizer::byte()).unwrap();
        assert_eq!(ids(&data.train), b"0123456789abcdefgh".map(u32::from));
        assert_eq!(ids(&data.validation), b"ij".map(u32::from));
        assert_eq!((data.bytes_per_token, data.entropy_per_token), (1.0, None));
    }

    #[test]
    fn a_second_source_validates_instead() {
        let ((_a, train), (_b, val)) = (file(b"all of it trains"), file(b"held out"));
        let data = Dataset::load(&train, Some(&val), &Tokenizer::byte()).unwrap();
        assert_eq!((data.train.len(), data.validation.len()), (16, 8));
        let swapped = Dataset::load(&val, Some(&train), &Tokenizer::byte()).unwrap();
        assert_ne!(data.fingerprint, swapped.fingerprint);
    }

    #[test]
    fn the_grammar_knows_its_entropy_in_bytes_only() {
        let data = Dataset::load(&Source::Grammar, None, &Tokenizer::byte()).unwrap();
        assert_eq!(data.entropy_per_token, Some(grammar::entropy_per_token()));
        assert!((199_000..201_000).contains(&(data.train.len() + data.validation.len())));
        assert_eq!(data.fingerprint, Dataset::load(&Source::Grammar, None, &Tokenizer::byte()).unwrap().fingerprint);
    }

    #[test]
    fn bad_files_are_refused_with_the_position() {
        let cases: [(&[u8], &str); 4] = [
            (b"", "holds no text"),
            (b" \n\t ", "holds no text"),
            (b"one\ntwo \xFF three", "byte 8 (line 2) is 0xFF"),
            (b"cut short \xE2\x82", "byte 10 (line 1) is 0xE2"),
        ];
        for (bytes, expected) in cases {
            let (_folder, source) = file(bytes);
            let message = Dataset::load(&source, None, &Tokenizer::byte()).unwrap_err().to_string();
            assert!(message.contains("text.txt") && message.contains(expected), "{message}");
        }
        for path in ["/no/such/file.txt", "/"] {
            let error = Dataset::load(&Source::Text(path.into()), None, &Tokenizer::byte()).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().starts_with(path), "{error}");
        }
    }
}
