//! Reads the rows of a Parquet file in a separate process with limits on memory and processor time.
//!
//! The Parquet crate trusts the sizes in a file's footer and page headers: a few hundred bytes can make it allocate
//! gigabytes, or iterate over billions of booleans that take no bytes.

use super::catch_panic::catch_panic;
use super::format::EXPECTED_FIELDS;
use super::source::Document;
use crate::untrusted::subprocess::{self, ExitCause};
use crate::{Error, Result, untrusted};
use minijinja::Value;
use minijinja::value::Serde;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// The first argument that makes the program call [`worker_main`].
pub const ARGUMENT: &str = "__parquet-rows";
/// Limit on a row, in bytes: the limit on a line of JSON, with room for escapes.
const MAX_LINE: u64 = 256 << 20;

/// Limit on the processor time per row, in seconds; a page of 100 MB takes one.
const MAX_SECONDS: u64 = 30;
/// Between two looks at that time.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

type ValueCallback<'a> = dyn FnMut(Value) -> Result<()> + 'a;

/// One line between the processes.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RowMessage {
    Row(Value),
    Failure(String),
    End,
}

/// Passes every row of `file` to `row` in the form of a line of JSON, with only the columns in `fields`; with all
/// columns if there are no `fields`.
pub(super) fn read(file: &Document, fields: &[&str], row: &mut ValueCallback<'_>) -> Result<()> {
    match subprocess::worker_command(ARGUMENT) {
        Some(command) => read_in_subprocess(command, file, fields, row),
        None => read_in_process(&file.path, fields, row, &|message| file.error(message)),
    }
}

/// Reads the file that the first argument names and writes its rows, with the columns that the others name, to standard
/// output, within the limits.
pub fn worker_main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.collect();
    let Some((path, fields)) = arguments.split_first() else { return ExitCode::FAILURE };
    let fields: Vec<&str> = fields.iter().filter_map(|field| field.to_str()).collect();
    subprocess::end_with_parent();
    subprocess::limit_memory();
    subprocess::limit_computing(MAX_SECONDS);
    let mut polled = Instant::now();
    let mut out = BufWriter::new(std::io::stdout().lock());
    let mut send = |message: &RowMessage| -> std::io::Result<()> {
        serde_json::to_writer(&mut out, message)?;
        out.write_all(b"\n")?;
        if matches!(message, RowMessage::Row(_)) { Ok(()) } else { out.flush() }
    };
    let mut row = |value| {
        if polled.elapsed() > POLL_INTERVAL {
            polled = Instant::now();
            subprocess::limit_computing(MAX_SECONDS);
        }
        send(&RowMessage::Row(value)).map_err(Error::stdout)
    };
    let last = match read_in_process(Path::new(path), &fields, &mut row, &|message| Error::data("", message)) {
        Ok(()) => RowMessage::End,
        // The other process adds the origin.
        Err(error) => RowMessage::Failure(error.into_message()),
    };
    if send(&last).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn read_in_subprocess(
    mut command: Command,
    file: &Document,
    fields: &[&str],
    row: &mut ValueCallback<'_>,
) -> Result<()> {
    const NOT_STARTED: &str = "its reader subprocess could not be started";
    command.arg(&file.path).args(fields);
    let mut child = command.spawn().map_err(|error| file.error(format!("{NOT_STARTED}: {error}")))?;
    let result = child.stdout.take().map_or(Err(file.error(NOT_STARTED)), |out| {
        let mut out = BufReader::with_capacity(1 << 18, out);
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = (&mut out).take(MAX_LINE).read_until(b'\n', &mut line);
            match read.ok().and_then(|_| serde_json::from_slice(&line).ok()) {
                Some(RowMessage::Row(value)) => row(value)?,
                Some(RowMessage::Failure(message)) => return Err(file.error(message)),
                Some(RowMessage::End) => return Ok(()),
                None if line.len() as u64 == MAX_LINE => return Err(file.error("a row is longer than 256 MiB")),
                None => {
                    let why = match subprocess::exit_cause(&mut child) {
                        ExitCause::OutOfMemory => "reading it takes more than 2 GiB of memory".to_owned(),
                        ExitCause::OutOfTime => format!("a row takes more than {MAX_SECONDS} s of processor time"),
                        ExitCause::Otherwise(how) => format!("its process {how}"),
                    };
                    return Err(file.error(format!("not a readable Parquet file: {why}")));
                }
            }
        }
    });
    // The process has ended, or the caller has stopped reading.
    let _ = child.kill();
    let _ = child.wait();
    result
}

/// Like [`read`]; `wrong` turns a description of the file's fault into an error.
fn read_in_process(
    path: &Path,
    fields: &[&str],
    row: &mut ValueCallback<'_>,
    wrong: &dyn Fn(String) -> Error,
) -> Result<()> {
    let damaged_at = |location: &str, error: ParquetError| {
        let text = error.to_string();
        wrong(if text.contains("Disabled feature") {
            "its compression is not supported; write it with Snappy, gzip, LZ4 or Zstandard".to_owned()
        } else {
            // A message about a text that is not UTF-8 has all its bytes.
            format!("not a readable Parquet file: {location}{}", text.split(" Bytes: ").next().unwrap_or(&text))
        })
    };
    let damaged = |error| damaged_at("", error);
    let file = untrusted::open(path).map_err(|error| wrong(format!("it cannot be read: {error}")))?;
    let reader = catch_parquet_panic(|| SerializedFileReader::new(file)).map_err(damaged)?;
    let schema = reader.metadata().file_metadata().schema();
    let every = fields.is_empty();
    let wanted = schema.get_fields().iter().filter(|field| every || fields.contains(&field.name())).cloned().collect();
    let projection = Type::group_type_builder(schema.name()).with_fields(wanted).build().map_err(damaged)?;
    if projection.get_fields().is_empty() {
        let columns: Vec<_> = schema.get_fields().iter().map(|field| format!("`{}`", field.name())).collect();
        return Err(wrong(format!("its columns are {}; {EXPECTED_FIELDS}", columns.join(", "))));
    }
    let mut iterator = catch_parquet_panic(|| reader.get_row_iter(Some(projection))).map_err(damaged)?;
    let converted = |row: Row| check_weight(&row).and_then(|()| object(&row, every, |_| true));
    let mut next = || catch_parquet_panic(|| iterator.next().transpose()?.map(converted).transpose());
    for number in 1.. {
        let Some(value) = next().map_err(|error| damaged_at(&format!("row {number}: "), error))? else { break };
        row(value)?;
    }
    Ok(())
}

/// Rejects a weight that JSON would have as null.
fn check_weight(row: &Row) -> parquet::errors::Result<()> {
    match row.get_column_iter().find(|(name, _)| *name == "weight") {
        Some((_, weight)) if *weight != Field::Null && weight.to_json_value().is_null() => {
            Err(ParquetError::General(format!("`weight` is {weight}")))
        }
        _ => Ok(()),
    }
}

/// The value of `field`, with bytes of no type as text, which some writers mean. Bytes that are not text, such as an
/// image, are an error, or with `base64` the Parquet crate's form of them.
fn value(field: &Field, base64: bool) -> parquet::errors::Result<Value> {
    Ok(match field {
        Field::Bytes(bytes) if !base64 || bytes.as_utf8().is_ok() => Value::from(bytes.as_utf8()?),
        Field::Group(row) => {
            // Templates print a message's `content` even if it is null.
            let is_message = row.get_column_iter().any(|(name, field)| name == "role" && *field != Field::Null);
            object(row, base64, |name| is_message && name == "content")?
        }
        Field::ListInternal(list) => {
            list.elements().iter().map(|item| value(item, base64)).collect::<parquet::errors::Result<_>>()?
        }
        Field::MapInternal(map) => {
            let pairs = map.entries().iter().map(|(key, item)| {
                let key = value(key, base64)?;
                Ok((key.as_str().map_or_else(|| key.to_string(), str::to_owned), value(item, base64)?))
            });
            Value::from_pairs(pairs.collect::<parquet::errors::Result<Vec<_>>>()?)
        }
        other => Value::from(Serde(other.to_json_value())),
    })
}

/// The value of a row or struct, with its fields in their order. Fields that are null are left out unless `keeps_null`
/// is true for their name: every struct of a column has the fields of all others.
fn object(row: &Row, base64: bool, keeps_null: impl Fn(&str) -> bool) -> parquet::errors::Result<Value> {
    let kept = row.get_column_iter().filter(|(name, field)| **field != Field::Null || keeps_null(name));
    let pairs = kept.map(|(name, field)| Ok((name.clone(), value(field, base64)?)));
    Ok(Value::from_pairs(pairs.collect::<parquet::errors::Result<Vec<_>>>()?))
}

/// Turns a panic of the Parquet crate into its error: some damaged pages make it index out of bounds (60.1).
fn catch_parquet_panic<T>(read: impl FnOnce() -> parquet::errors::Result<T>) -> parquet::errors::Result<T> {
    catch_panic(read).unwrap_or_else(|| Err(ParquetError::General("a page is damaged".to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::data_type::ByteArray;
    use std::sync::Arc;

    #[test]
    fn bytes_that_are_not_text_are_refused_or_base64() {
        let bytes = |bytes: &[u8]| Field::Bytes(ByteArray::from(bytes.to_vec()));
        let text = |field: &Field, base64| value(field, base64).unwrap().to_string();
        assert!(value(&bytes(b"\xFF\xD8"), false).is_err());
        assert_eq!(text(&bytes(b"\xFF\xD8"), true), "/9g=");
        assert_eq!([false, true].map(|base64| text(&bytes(b"a"), base64)), ["a", "a"]);
    }

    #[test]
    fn a_weight_that_is_no_number_is_not_a_missing_one() {
        let check = |weight| check_weight(&Row::new(vec![("weight".to_owned(), Field::Double(weight))]));
        let message = check(f64::NAN).unwrap_err().to_string();
        assert!(message.contains("`weight` is NaN"), "{message}");
        check(0.5).unwrap();
    }

    /// Tools are written into prompts in this order. A template that asks whether a message has `tool_calls` must not
    /// find it in all messages, and it prints a null `content`.
    #[test]
    fn rows_have_the_fields_of_a_line_of_json() {
        let text = |text: &str| Field::Str(text.to_owned());
        let group = |fields: &[(&str, Field)]| {
            let fields = fields.iter().map(|(name, field)| ((*name).to_owned(), field.clone()));
            Field::Group(Row::new(fields.collect()))
        };
        let message = group(&[("role", text("a")), ("content", text("b")), ("tool_calls", Field::Null)]);
        let call = group(&[("name", text("f")), ("content", Field::Null)]);
        let answer = group(&[("role", text("c")), ("content", Field::Null), ("tool_calls", call)]);
        let row = Row::new(vec![("q".into(), message), ("a".into(), answer), ("tools".into(), Field::Null)]);
        let row = serde_json::to_string(&object(&row, false, |_| true).unwrap()).unwrap();
        let line = r#"{"q":{"role":"a","content":"b"},"a":{"role":"c","content":null,"tool_calls":{"name":"f"}},"tools":null}"#;
        assert_eq!(row, line);
    }

    #[test]
    fn a_map_keeps_its_order() {
        use parquet::data_type::{ByteArrayType, Int32Type};
        let schema = "message rows { required group tools (MAP) { repeated group key_value {
            required binary key (UTF8); required group value { required int32 d; required int32 c; } } } }";
        let schema = parquet::schema::parser::parse_message_type(schema).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let out = file.reopen().unwrap();
        let mut writer = parquet::file::writer::SerializedFileWriter::new(out, schema.into(), Arc::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let levels: (&[i16], &[i16]) = (&[1, 1], &[0, 1]);
        for number in 0..3 {
            let mut column = group.next_column().unwrap().unwrap();
            if number == 0 {
                let keys = ["b", "a"].map(ByteArray::from);
                column.typed::<ByteArrayType>().write_batch(&keys, Some(levels.0), Some(levels.1)).unwrap();
            } else {
                column.typed::<Int32Type>().write_batch(&[number, 7], Some(levels.0), Some(levels.1)).unwrap();
            }
            column.close().unwrap();
        }
        group.close().unwrap();
        writer.close().unwrap();
        let mut rows = Vec::new();
        let mut keep = |row: Value| {
            rows.push(serde_json::to_string(&row).unwrap());
            Ok(())
        };
        read_in_process(file.path(), &[], &mut keep, &|message| Error::data("", message)).unwrap();
        assert_eq!(rows, [r#"{"tools":{"b":{"d":1,"c":2},"a":{"d":7,"c":7}}}"#]);
    }
}
