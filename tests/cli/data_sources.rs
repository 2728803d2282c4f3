//! Data as a run loads it: files of every kind to tokens, the token cache, many processes at once.

use finetune::Result;
use finetune::data::{
    DataSource, Dataset, DatasetBuilder, DatasetKind, DatasetOptions, Downloader, HubFile, HubListing, IGNORE_INDEX,
    LoadEvent, LossOn, SequenceIndex, TokenSource, Tokenizer, grammar,
};
use std::fs;
use std::path::{Path, PathBuf};

fn ids(tokens: &TokenSource) -> Vec<u32> {
    let mut out = vec![0; tokens.len()];
    tokens.read(0, &mut out);
    out
}

fn targets(tokens: &TokenSource) -> Vec<u32> {
    let mut out = vec![0; tokens.len()];
    tokens.read_labels(0, &mut out);
    out
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Writes a file and names it as a source.
fn file(folder: &Path, name: &str, content: &str) -> DataSource {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, content).unwrap();
    DataSource::Path(path)
}

/// Loads with the cache in `folder`, and returns the reported events.
fn load(folder: &Path, source: &DataSource, val: Option<&DataSource>) -> (Result<Dataset>, Vec<LoadEvent>) {
    let mut events = Vec::new();
    let mut report = |event| events.push(event);
    let mut builder = DatasetBuilder { report: Some(&mut report), ..DatasetBuilder::new(folder) };
    let loaded = builder.load(source, val, &Tokenizer::byte());
    (loaded, events)
}

fn token_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "tokens")).collect()
}

fn notices(events: &[LoadEvent]) -> Vec<&str> {
    events
        .iter()
        .filter_map(|event| if let LoadEvent::Notice(text) = event { Some(text.as_str()) } else { None })
        .collect()
}

/// A log in the folder of the data would be read when the run is continued.
#[test]
fn the_files_of_runs_are_not_data() {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in [("a.txt", "some words"), ("runs/one/config.toml", ""), ("runs/one/events.jsonl", "{}\n")] {
        file(folder.path(), name, content);
    }
    file(folder.path(), "runs/b.txt", " and more");
    let cache = tempfile::tempdir().unwrap();
    let data = load(cache.path(), &DataSource::Path(folder.path().into()), Some(&DataSource::Grammar)).0.unwrap();
    assert_eq!(data.train.len(), "some words and more".len() + 1);
}

#[test]
fn the_tail_of_a_file_validates() {
    let folder = tempfile::tempdir().unwrap();
    let data = load(folder.path(), &file(folder.path(), "a.txt", "0123456789abcdefghij"), None).0.unwrap();
    assert_eq!(ids(&data.train), bytes("0123456789abcdefgh"));
    assert_eq!(ids(&data.validation), bytes("ij"));
    assert_eq!((data.validation_bytes_per_token, data.entropy_per_token), (1.0, None));
}

#[test]
fn a_second_source_validates_instead() {
    let folder = tempfile::tempdir().unwrap();
    let train = file(folder.path(), "a.txt", "all of it trains");
    let val = file(folder.path(), "b.txt", "held out");
    let data = load(folder.path(), &train, Some(&val)).0.unwrap();
    assert_eq!((data.train.len(), data.validation.len()), (16, 8));
    let swapped = load(folder.path(), &val, Some(&train)).0.unwrap();
    assert_ne!(data.fingerprint, swapped.fingerprint);
    let alone = load(folder.path(), &train, None).0.unwrap();
    assert_ne!(data.fingerprint, alone.fingerprint);
}

#[test]
fn the_grammar_knows_its_entropy_and_needs_no_folder() {
    let data = DatasetBuilder::new("/nowhere").load(&DataSource::Grammar, None, &Tokenizer::byte()).unwrap();
    assert_eq!(data.entropy_per_token, Some(grammar::entropy_per_token()));
    assert!((200_000..200_100).contains(&(data.train.len() + data.validation.len())));
}

#[test]
fn documents_are_separated_by_the_end_of_text() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = folder.path().join("corpus");
    // A byte order mark is no text.
    file(&corpus, "a.txt", "\u{feff}one");
    file(&corpus, "b.jsonl", "{\"text\": \"two\"}\n{\"text\": \"\"}\n{\"text\": \"end\"}\n");
    let val = file(folder.path(), "val.txt", "v");
    let corpus = DataSource::Glob(corpus.join("*").display().to_string());
    let data = load(folder.path(), &corpus, Some(&val)).0.unwrap();
    let eos = Tokenizer::byte().eos_id().unwrap();
    let expected = [bytes("one"), vec![eos], bytes("two"), vec![eos], bytes("end")].concat();
    assert_eq!(ids(&data.train), expected);
    assert_eq!(targets(&data.train), expected, "all of it counts in the loss");
    assert_eq!(data.train.documents().collect::<Vec<_>>(), [0..4, 4..8, 8..11]);
}

#[test]
fn samples_end_with_what_ends_their_answers_and_stay_whole() {
    let folder = tempfile::tempdir().unwrap();
    let row = |n: usize| format!("{{\"prompt\": \"p{n}\", \"completion\": \"c{n}\"}}\n");
    let source = file(folder.path(), "a.jsonl", &(0..5).map(row).collect::<String>());
    let data = load(folder.path(), &source, None).0.unwrap();
    let eos = Tokenizer::byte().eos_id().unwrap();
    let sample = |n: usize| [bytes(&format!("p{n}c{n}")), vec![eos]].concat();
    assert_eq!(ids(&data.train), (0..4).flat_map(sample).collect::<Vec<_>>());
    assert_eq!(ids(&data.validation), sample(4), "the last tenth, and at least one sample");
    let learned = [IGNORE_INDEX, IGNORE_INDEX, u32::from(b'c'), u32::from(b'4'), eos];
    assert_eq!(targets(&data.validation), learned);
    assert_eq!(data.train.kind(), DatasetKind::PromptCompletion);
    let alone = file(folder.path(), "b.jsonl", &row(0));
    let data = load(folder.path(), &alone, None).0.unwrap();
    let message = SequenceIndex::new(data.validation, 8, false, "held out").unwrap_err().to_string();
    assert!(message.contains("one sample is too few"), "{message}");
}

#[test]
fn what_is_learned_of_a_conversation_is_what_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let say = |role: &str, content: &str| format!("{{\"role\": \"{role}\", \"content\": \"{content}\"}}");
    let turns = [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")].join(",");
    let source = file(folder.path(), "a.jsonl", &format!("{{\"messages\": [{turns}]}}\n"));
    let text = "user: a\nassistant: b<|endoftext|>\nuser: c\nassistant: d<|endoftext|>\n";
    for (loss_on, expected) in [
        (LossOn::Answers, vec![" b<|endoftext|>", " d<|endoftext|>"]),
        (LossOn::LastAnswer, vec![" d<|endoftext|>"]),
        (LossOn::All, vec![text]),
    ] {
        let options = DatasetOptions { loss_on, ..DatasetOptions::default() };
        let mut loader = DatasetBuilder { options, ..DatasetBuilder::new(folder.path()) };
        let (tokens, _) = loader.load_unsplit(&source, &Tokenizer::byte()).unwrap();
        let (ids, targets) = (ids(&tokens), targets(&tokens));
        assert_eq!(Tokenizer::byte().decode(&ids).unwrap(), text.replace("<|endoftext|>", ""));
        let pairs: Vec<(u32, bool)> =
            ids.into_iter().zip(targets).map(|(id, target)| (id, target != IGNORE_INDEX)).collect();
        let learned: Vec<Vec<u32>> = pairs
            .chunk_by(|a, b| a.1 == b.1)
            .filter(|part| part[0].1)
            .map(|part| part.iter().map(|(id, _)| *id).collect())
            .collect();
        let expected: Vec<Vec<u32>> =
            expected.into_iter().map(|text| Tokenizer::byte().encode(text).unwrap()).collect();
        assert_eq!(learned, expected, "{loss_on:?}");
    }
}

#[test]
fn rows_without_an_answer_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = file(folder.path(), "a.jsonl", r#"{"messages": [{"role": "user", "content": "hello?"}]}"#);
    let message = load(folder.path(), &source, None).0.unwrap_err().to_string();
    assert!(message.contains("a.jsonl: no loss tokens"), "{message}");
    assert!(token_files(folder.path()).is_empty());
}

#[test]
fn a_second_run_reads_the_cache_and_a_damaged_one_is_rebuilt() {
    let folder = tempfile::tempdir().unwrap();
    let source = file(folder.path(), "a.txt", &grammar::text(5, 20_000));
    let (first, events) = load(folder.path(), &source, None);
    assert!(
        matches!(events.last(), Some(LoadEvent::Progress { done, total, .. }) if done == total && *total >= 20_000)
    );
    let (second, events) = load(folder.path(), &source, None);
    assert_eq!(events, [], "nothing is tokenized twice");
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(ids(&first.train), ids(&second.train));
    assert_eq!(first.fingerprint, second.fingerprint);

    let cache = token_files(folder.path()).pop().unwrap();
    let good = fs::read(&cache).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    for bad in [&flipped[..], &good[..good.len() / 2], &good[..10], b""] {
        // As a crash would leave it: a new file, since `first` still maps the old one.
        fs::remove_file(&cache).unwrap();
        fs::write(&cache, bad).unwrap();
        let (again, events) = load(folder.path(), &source, None);
        assert!(notices(&events)[0].contains("is damaged"), "{events:?}");
        assert_eq!(ids(&again.unwrap().train), ids(&first.train));
        assert_eq!(fs::read(&cache).unwrap(), good);
    }
}

#[test]
fn content_and_tokenizer_decide_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let first = load(folder.path(), &file(folder.path(), "a.txt", "some text here"), None).0.unwrap();
    let renamed = load(folder.path(), &file(folder.path(), "b.txt", "some text here"), None).0.unwrap();
    assert_eq!(first.fingerprint, renamed.fingerprint);
    assert_eq!(token_files(folder.path()).len(), 1);
    let changed = load(folder.path(), &file(folder.path(), "a.txt", "some text hers"), None).0.unwrap();
    assert_ne!(first.fingerprint, changed.fingerprint);
    assert_eq!(token_files(folder.path()).len(), 2);
}

#[test]
fn a_folder_that_cannot_be_written_costs_the_cache_only() {
    let folder = tempfile::tempdir().unwrap();
    let source = file(folder.path(), "a.txt", "some text here");
    // A file in the folder's place: also refused to root, whom permissions do not stop.
    let (loaded, events) = load(&folder.path().join("a.txt"), &source, None);
    assert_eq!(loaded.unwrap().train.len(), 12);
    assert!(notices(&events)[0].contains("will not be cached"), "{events:?}");
}

#[test]
fn many_at_once_agree() {
    let folder = tempfile::tempdir().unwrap();
    let source = file(folder.path(), "a.txt", &grammar::text(6, 300_000));
    let all: Vec<Vec<u32>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..8).map(|_| scope.spawn(|| ids(&load(folder.path(), &source, None).0.unwrap().train))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "the text and one token file");
}

#[test]
fn missing_files_say_what_is_possible() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["nothing.txt", "no-folder/", "tiny_shakespear"] {
        let error = load(folder.path(), &DataSource::Path(folder.path().join(name)), None).0.unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains("`tiny_shakespeare`"), "{error}");
    }
    let error = load(folder.path(), &DataSource::Path(folder.path().into()), None).0.unwrap_err();
    assert!(error.to_string().contains("contains no `.txt`"), "{error}");
    fs::write(folder.path().join("a.jsonl.gz"), "").unwrap();
    let error = load(folder.path(), &DataSource::Path(folder.path().into()), None).0.unwrap_err();
    assert!(error.to_string().ends_with("file; decompress its files first"), "{error}");
}

/// A network that serves one file.
struct OneFile(PathBuf, usize);

impl Downloader for OneFile {
    fn list(&mut self, repo: &str, revision: &str) -> Result<HubListing> {
        panic!("the list of {repo} at {revision} is not needed")
    }

    fn download(&mut self, remote: HubFile) -> Result<PathBuf> {
        self.1 += 1;
        assert_eq!(remote, HubFile { repo: "o/n", revision: "main", file: "d/f.jsonl" });
        Ok(self.0.clone())
    }
}

#[test]
fn files_of_the_hub_are_fetched_and_read_by_their_name() {
    let folder = tempfile::tempdir().unwrap();
    file(folder.path(), "blob", "{\"text\": \"from afar\"}\n{\"text\": \"x\"}");
    let mut hub = OneFile(folder.path().join("blob"), 0);
    let source: DataSource = "hf://datasets/o/n/d/f.jsonl".parse().unwrap();
    let mut loader = DatasetBuilder { downloader: Some(&mut hub), ..DatasetBuilder::new(folder.path()) };
    let data = loader.load(&source, None, &Tokenizer::byte()).unwrap();
    assert_eq!(ids(&data.train)[..9], bytes("from afar"));
    assert_eq!(hub.1, 1);
}

/// Bounded memory and speed on a large file.
#[test]
#[ignore = "writes 1 GB; .ci/full runs it in a release build"]
fn a_gigabyte_is_tokenized_in_bounded_memory() {
    use std::io::Write as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.txt");
    let mut out = std::io::BufWriter::new(fs::File::create(&path).unwrap());
    for seed in 0..1000 {
        out.write_all(grammar::text(seed, 1_000_000).as_bytes()).unwrap();
    }
    drop(out);
    let json = std::env::var_os("TOKENIZER").map_or(Tokenizer::byte(), |path| Tokenizer::from_file(path).unwrap());
    let start = std::time::Instant::now();
    let data = DatasetBuilder::new(folder.path()).load(&DataSource::Path(path), None, &json).unwrap();
    let megabytes_per_s = 1000.0 / start.elapsed().as_secs_f64();
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = |key: &str| {
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
    };
    // Pages of the map count as resident but can be dropped at any time.
    let (resident, mapped) = (peak("VmHWM"), peak("RssFile"));
    println!("{} tokens, {megabytes_per_s:.1} MB/s, peak {resident} MiB of which {mapped} mapped", data.train.len());
    assert!(resident - mapped.min(resident) < 300, "peak {resident} MiB");
    assert!(megabytes_per_s > 10.0, "{megabytes_per_s} MB/s");
}

#[test]
fn bits_per_byte_count_the_bytes_that_are_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let rows = r#"{"prompt": "a long prompt that is only read", "completion": "ééé"}"#;
    let train = file(folder.path(), "a.jsonl", &format!("{rows}\n{rows}\n"));
    // Two bytes per token, because the vocabulary is made of words.
    let val = file(folder.path(), "b.txt", "ab ab ab ab ab ab");
    let of_training = || DatasetBuilder::new(folder.path()).load_unsplit(&train, &Tokenizer::byte()).unwrap().1;
    // Two completions of six bytes, each with its end.
    assert_eq!(of_training(), 12.0 / 14.0);
    assert_eq!(of_training(), 12.0 / 14.0, "from the cache");
    let data = load(folder.path(), &train, Some(&val)).0.unwrap();
    assert_eq!(data.validation_bytes_per_token, 1.0);
}

#[test]
fn a_text_that_changes_while_it_is_read_is_refused_and_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let source = file(folder.path(), "a.txt", "what was hashed");
    let DataSource::Path(path) = &source else { panic!() };
    let mut rewrite = |_| fs::write(path, "something else ").unwrap();
    let mut builder = DatasetBuilder { report: Some(&mut rewrite), ..DatasetBuilder::new(folder.path()) };
    let loaded = builder.load(&source, None, &Tokenizer::byte());
    assert!(loaded.unwrap_err().to_string().contains("the text changed while it was being read"));
    assert!(token_files(folder.path()).is_empty());
    let data = load(folder.path(), &source, None).0.unwrap();
    assert_eq!(ids(&data.train)[..9], bytes("something"));
}

#[cfg(unix)]
#[test]
fn a_pipe_is_text_and_a_device_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe.txt");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // A writer that has said all and closes its end later.
    let mut writer = fs::File::options().read(true).write(true).open(&pipe).unwrap();
    std::io::Write::write_all(&mut writer, b"through a pipe").unwrap();
    let closing = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(500));
        drop(writer);
    });
    let data = load(folder.path(), &DataSource::Path(pipe), None).0.unwrap();
    assert_eq!(ids(&data.train), bytes("through a pi"));
    closing.join().unwrap();
    for device in ["/dev/zero", "/dev/full"] {
        let message = self::load(folder.path(), &DataSource::Path(device.into()), None).0.unwrap_err().to_string();
        assert!(message.contains("not a regular file"), "{message}");
    }
}
