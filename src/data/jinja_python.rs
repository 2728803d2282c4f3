//! Chat templates are written for Jinja in Python. These are its differences from the engine here: the operator `%`
//! formats texts, floats and lists are written differently, and strings have more white space.

use minijinja::filters::{float, int};
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State, context, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;

/// The filter that replaces `%`.
const PERCENT: &str = "python_percent";
/// The maximum nesting of brackets in an expression; the engine accepts less.
const MAX_DEPTH: usize = 200;

/// Makes `environment` write, trim and format like Python.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out: &mut Output, state: &mut State, value: &Value| match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            out.write_str(&string(value)).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    });
    environment.add_filter("string", |value: Value| string(&value));
    environment.add_filter("indent", indent);
    environment.add_filter("tojson", tojson);
    environment.add_filter("replace", |text: &Value, from: &Value, to: &Value, count: Option<i64>| {
        string(text).replacen(&string(from), &string(to), limit(count))
    });
    environment.add_filter("trim", |value: Value, chars: Option<String>| {
        let text = value.to_string();
        chars.map_or_else(
            || text.trim_matches(is_space).to_owned(),
            |chars| text.trim_matches(|c| chars.contains(c)).to_owned(),
        )
    });
    // The engine has no default for a text that is no number.
    environment.add_filter(
        "int",
        |state: &State, value: &Value, default: Option<Value>, base: Option<u32>, named: Kwargs| {
            let named_default: Option<Value> = named.get("default")?;
            int(state, &trimmed(value), default.or(named_default).or(Some(0.into())), base, named)
        },
    );
    environment.add_filter("float", |state: &State, value: &Value, default: Option<Value>, named: Kwargs| {
        let named_default: Option<Value> = named.get("default")?;
        float(state, &trimmed(value), default.or(named_default).or(Some(0.0.into())), named)
    });
    environment.add_filter(PERCENT, percent);
    for name in ["e", "escape"] {
        environment.add_filter(name, escape);
    }
    // The engine iterates over none, and has only lists as sequences.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| value.is_undefined() || value.len().is_some());
}

/// Jinja's filter `escape`, which writes quotes as numbers.
fn escape(value: Value) -> Value {
    let escapes = [("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ("\"", "&#34;")];
    let escaped = || escapes.iter().fold(string(&value), |text, (from, to)| text.replace(from, to));
    if value.is_safe() { value } else { Value::from_safe_string(escaped()) }
}

/// A float in the format of Python's `str`; `None` for other values.
fn float_text(value: &Value) -> Option<String> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float.then(|| format(FormatStyle::Printf, "%s", std::slice::from_ref(value)).ok()).flatten()
}

/// Python's `str`.
fn string(value: &Value) -> String {
    let mut out = String::new();
    match value.as_str() {
        Some(text) => out.push_str(text),
        None => write_repr(value, &mut out),
    }
    out
}

/// Writes a value in the format of Python's `repr`.
fn write_repr(value: &Value, out: &mut String) {
    if value.as_str().is_some() {
        return write_quoted(value, out);
    }
    let items: Vec<Value> = value.try_iter().into_iter().flatten().collect();
    let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
    let [open, close] = match value.kind() {
        ValueKind::Map => ["{", "}"],
        _ if is_tuple => ["(", if items.len() == 1 { ",)" } else { ")" }],
        ValueKind::Seq | ValueKind::Iterable => ["[", "]"],
        _ => return out.push_str(&float_text(value).unwrap_or_else(|| value.to_string())),
    };
    out.push_str(open);
    for (index, item) in items.iter().enumerate() {
        out.push_str(if index > 0 { ", " } else { "" });
        write_repr(item, out);
        if value.kind() == ValueKind::Map {
            out.push_str(": ");
            write_repr(&value.get_item(item).unwrap_or_default(), out);
        }
    }
    out.push_str(close);
}

/// Writes a text in quotes. The engine leaves characters such as a no-break space as they are.
fn write_quoted(text: &Value, out: &mut String) {
    for c in format!("{text:?}").chars() {
        // The letter keeps a combining character, which is printable, from being the first one.
        if !format!("a{c}").escape_debug().to_string().starts_with("a\\u") {
            out.push(c);
            continue;
        }
        let escape = match u32::from(c) {
            code @ ..=0xFF => format!("\\x{code:02x}"),
            code @ ..=0xFFFF => format!("\\u{code:04x}"),
            code => format!("\\U{code:08x}"),
        };
        out.push_str(&escape);
    }
}

/// Jinja's filter `indent`, whose lines end as in Python's `str.splitlines`.
#[expect(clippy::needless_pass_by_value, reason = "a filter's signature")]
fn indent(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let [width, first, blank] = arguments(&positional, &named, ["width", "first", "blank"])?;
    let [first, blank] = [first, blank].map(|flag| flag.is_some_and(|flag| flag.is_true()));
    let margin = margin(&width.unwrap_or_else(|| 4.into()))?;
    let mut out = String::new();
    for (number, line) in string(value).replace("\r\n", "\n").split(ends_line).enumerate() {
        out.push_str(if number > 0 { "\n" } else { "" });
        let is_indented = if number > 0 { blank || !line.is_empty() } else { first };
        out.push_str(if is_indented { &margin } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

/// The white space of a level, which a filter has as a number of spaces or as a text.
fn margin(width: &Value) -> Result<String, Error> {
    match width.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => i64::try_from(width.clone()).map(|width| " ".repeat(width.max(0) as usize)),
    }
}

/// A filter's arguments, which are given in this order or by their names; an unknown name is an error.
fn arguments<const N: usize>(
    positional: &[Value],
    named: &Kwargs,
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let mut found = [const { None }; N];
    for (index, name) in names.into_iter().enumerate() {
        let given =
            positional.get(index).cloned().map_or_else(|| named.get::<Option<Value>>(name), |value| Ok(Some(value)));
        found[index] = given?.filter(|value| !value.is_none());
    }
    named.assert_all_used()?;
    Ok(found)
}

/// Whether Python's `str.strip` removes `c`.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\x1C'..='\x1F')
}

/// Whether Python's `str.splitlines` ends a line at `c`.
fn ends_line(c: char) -> bool {
    matches!(c, '\n'..='\r' | '\x1C'..='\x1E' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Python's `str.splitlines`; the lines include their ends if `keepends`.
fn split_lines(mut text: &str, keepends: bool) -> Value {
    let mut lines = Vec::new();
    while !text.is_empty() {
        let line = text.find(ends_line).unwrap_or(text.len());
        let end =
            if text[line..].starts_with("\r\n") { 2 } else { text[line..].chars().next().map_or(0, char::len_utf8) };
        lines.push(&text[..if keepends { line + end } else { line }]);
        text = &text[line + end..];
    }
    lines.into_iter().map(Value::from).collect()
}

/// A number's text as Python reads it, without white space around it.
fn trimmed(value: &Value) -> Value {
    value.as_str().map_or_else(|| value.clone(), |text| text.trim_matches(is_space).into())
}

/// A maximum number of replacements or splits, where negative ones stand for no maximum.
fn limit(count: Option<i64>) -> usize {
    count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX)
}

/// Python's `str.title`: every letter that follows no letter is a capital.
fn title(text: &str) -> String {
    let mut out = String::new();
    let mut follows_letter = false;
    for c in text.chars() {
        if follows_letter {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        follows_letter = c.is_lowercase() || c.is_uppercase();
    }
    out
}

/// Python's `str.split`, or `str.rsplit` if `from_end`.
fn split(text: &str, from_end: bool, args: &[Value]) -> Result<Value, Error> {
    let (positional, named): (Rest<Value>, Kwargs) = from_args(args)?;
    let [separator, most] = arguments(&positional, &named, ["sep", "maxsplit"])?;
    let most = limit(most.map(i64::try_from).transpose()?).saturating_add(1);
    let parts: Vec<&str> = match separator.as_ref().map(|separator| separator.as_str().unwrap_or_default()) {
        None if !from_end || most == usize::MAX => split_at_space(text, most),
        None | Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "the separator must be a text")),
        Some(separator) if from_end => text.rsplitn(most, separator).collect::<Vec<_>>().into_iter().rev().collect(),
        Some(separator) => text.splitn(most, separator).collect(),
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

/// The words of a text, at most `most`; the last of that number is the rest of the text.
fn split_at_space(mut text: &str, most: usize) -> Vec<&str> {
    let mut out = Vec::new();
    loop {
        text = text.trim_start_matches(is_space);
        if text.is_empty() {
            return out;
        }
        let end = if out.len() + 1 < most { text.find(is_space).unwrap_or(text.len()) } else { text.len() };
        out.push(&text[..end]);
        text = &text[end..];
    }
}

/// Python's methods of values.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let (Some(text), "split" | "rsplit") = (value.as_str(), name) {
        return split(text, name == "rsplit", args);
    }
    if let (Some(text), "splitlines") = (value.as_str(), name) {
        let (positional, named): (Rest<Value>, Kwargs) = from_args(args)?;
        let [keepends] = arguments(&positional, &named, ["keepends"])?;
        return Ok(split_lines(text, keepends.is_some_and(|flag| flag.is_true())));
    }
    if let (Some(text), true) = (value.as_str(), args.iter().all(Value::is_none)) {
        match name {
            "strip" => return Ok(text.trim_matches(is_space).into()),
            "lstrip" => return Ok(text.trim_start_matches(is_space).into()),
            "rstrip" => return Ok(text.trim_end_matches(is_space).into()),
            "title" => return Ok(title(text).into()),
            "isspace" if args.is_empty() => return Ok((!text.is_empty() && text.chars().all(is_space)).into()),
            _ => {}
        }
    }
    match (value.as_str(), name, args.first().and_then(Value::as_str)) {
        (Some(text), "removeprefix", Some(prefix)) => Ok(text.strip_prefix(prefix).unwrap_or(text).into()),
        (Some(text), "removesuffix", Some(suffix)) => Ok(text.strip_suffix(suffix).unwrap_or(text).into()),
        (None, "index", _) if args.len() == 1 && value.kind() == ValueKind::Seq => {
            let at = value.try_iter()?.position(|item| item == args[0]);
            at.map(Value::from).ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "the list has no such item"))
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

/// Python's `left % right`.
fn percent(state: &State, left: Value, right: Value) -> Result<Value, Error> {
    let Some(text) = left.as_str() else {
        return state.env().compile_expression("left % right")?.eval(context! { left, right });
    };
    let several = right.downcast_object_ref::<Tuple>().is_some();
    let args = match right.kind() {
        _ if several => right.try_iter()?.collect(),
        // The engine would look for names, as in `%(name)s`.
        ValueKind::Map if !text.contains("%(") => vec![string(&right).into()],
        _ => vec![right],
    };
    Ok(format(FormatStyle::Printf, text, &args)?.into())
}

/// Python's `json.dumps` with the options that transformers gives templates.
#[expect(clippy::needless_pass_by_value, reason = "a filter's signature")]
fn tojson(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ensure_ascii, indent, separators, sort_keys] = arguments(&positional, &named, names)?;
    let [ensure_ascii, sort_keys] = [ensure_ascii, sort_keys].map(|flag| flag.is_some_and(|flag| flag.is_true()));
    let indent = indent.as_ref().map(margin).transpose()?;
    let separators = match separators {
        Some(pair) => pair.try_iter()?.map(|text| text.to_string()).collect(),
        None => vec![if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
    };
    let Ok([between_items, after_key]) = <[String; 2]>::try_from(separators) else {
        return Err(Error::new(ErrorKind::InvalidOperation, "`separators` must have two texts"));
    };
    let mut out = String::new();
    JsonStyle { ensure_ascii, indent, between_items, after_key, sort_keys }.write(value, 0, &mut out)?;
    Ok(out)
}

struct JsonStyle {
    /// Whether characters outside of ASCII are escaped.
    ensure_ascii: bool,
    /// The white space of a level in front of each item, which is on a separate line; `None` for one line.
    indent: Option<String>,
    between_items: String,
    after_key: String,
    sort_keys: bool,
}

impl JsonStyle {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        let kind = value.kind();
        if !matches!(kind, ValueKind::Map | ValueKind::Seq | ValueKind::Iterable) {
            let text = scalar(value)?;
            if value.as_str().is_some() {
                self.write_text(&text, out);
            } else {
                out.push_str(&text);
            }
            return Ok(());
        }
        let [open, close] = if kind == ValueKind::Map { ['{', '}'] } else { ['[', ']'] };
        out.push(open);
        let mut items: Vec<Value> = value.try_iter()?.collect();
        if kind == ValueKind::Map && self.sort_keys {
            items.sort();
        }
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.between_items);
            }
            self.begin_line(depth + 1, out);
            if kind == ValueKind::Map {
                let key = if item.as_str().is_some() { item.clone() } else { scalar(item)?.into() };
                self.write(&key, depth, out)?;
                out.push_str(&self.after_key);
                self.write(&value.get_item(item)?, depth + 1, out)?;
            } else {
                self.write(item, depth + 1, out)?;
            }
        }
        if !items.is_empty() {
            self.begin_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn begin_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    /// Writes a text that is in quotes already.
    fn write_text(&self, quoted: &str, out: &mut String) {
        for c in quoted.chars() {
            if !self.ensure_ascii || matches!(c, ' '..='~') {
                out.push(c);
            } else {
                out.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
            }
        }
    }
}

/// A value without items in JSON.
fn scalar(value: &Value) -> Result<String, Error> {
    let Some(float) = float_text(value) else {
        let text = serde_json::to_string(value);
        return text.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()));
    };
    Ok(match float.as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        _ => float,
    })
}

/// Replaces `a % b` in a template's expressions by a filter that also formats text, because the engine's operator is
/// for numbers. Keeps the operator after a product or before a number.
pub(super) fn with_percent(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut at = 0;
    while let Some(start) = source[at..].find('{').map(|start| at + start) {
        let close = match source.as_bytes().get(start + 1) {
            Some(b'{') => "}}",
            Some(b'%') => "%}",
            Some(b'#') => "#}",
            _ => {
                out.push_str(&source[at..=start]);
                at = start + 1;
                continue;
            }
        };
        out.push_str(&source[at..start + 2]);
        at = start + 2;
        let tag = source[at..].trim_start_matches(['-', '+']).trim_start();
        let verbatim_to = match close {
            "%}" if tag.starts_with("raw") => Some("endraw"),
            "#}" => Some(close),
            _ => None,
        };
        at = if let Some(to) = verbatim_to {
            let end = source[at..].find(to).map_or(source.len(), |end| at + end);
            out.push_str(&source[at..end]);
            end
        } else {
            expression(source, at, Some(close), 0, &mut out)
        };
    }
    out.push_str(&source[at..]);
    out
}

/// The operators and operands before a position of an expression.
#[derive(Default)]
struct Before {
    /// Whether the last operator has the precedence of `%`.
    product: bool,
    /// Whether the last operand may be a text.
    text: bool,
}

impl Before {
    /// Whether `%` may format a text here: after a text, or else neither after a product nor before a number.
    fn formats(&self, right: &str) -> bool {
        let right = right.trim_start();
        !right.is_empty() && (self.text || !(self.product || right.starts_with(|c: char| c.is_ascii_digit())))
    }
}

/// Copies an expression from `at` to its end, or to `close`, with its operators `%` replaced; returns where it stopped.
fn expression(text: &str, mut at: usize, close: Option<&str>, depth: usize, out: &mut String) -> usize {
    let bytes = text.as_bytes();
    let mut before = Before::default();
    while at < bytes.len() && !close.is_some_and(|close| text[at..].starts_with(close)) {
        let start = at;
        match bytes[at] {
            b'%' if depth < MAX_DEPTH && before.formats(&text[at + 1..operand_end(text, at + 1)]) => {
                at = operand_end(text, at + 1);
                out.extend(["|", PERCENT, "("]);
                expression(&text[start + 1..at], 0, None, depth + 1, out);
                out.push(')');
                before.text = true;
                continue;
            }
            b'(' | b'[' | b'{' if depth < MAX_DEPTH => {
                at = group_end(text, at);
                out.push_str(&text[start..=start]);
                expression(&text[..at], start + 1, None, depth + 1, out);
                // Brackets that contain a text may have a text as their value.
                before.text = !before.product && text[start..at].contains(['"', '\'']);
                continue;
            }
            b'%' | b'*' | b'/' => {
                at += 1;
                before = Before { product: true, text: false };
            }
            b'"' | b'\'' => {
                at = string_end(text, at);
                before.text = true;
            }
            byte => {
                let operand = byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'|') || byte >= 128;
                before.product &= operand || byte.is_ascii_whitespace();
                before.text &= byte.is_ascii_whitespace();
                at = text.ceil_char_boundary(at + 1);
            }
        }
        out.push_str(&text[start..at]);
    }
    at
}

/// The end of the operand that begins at `at`, with its attributes, items, calls and filters.
fn operand_end(text: &str, at: usize) -> usize {
    let bytes = text.as_bytes();
    let after = |at: usize, of: fn(&u8) -> bool| at + bytes[at..].iter().take_while(|byte| of(byte)).count();
    let blank = |at: usize| after(at, u8::is_ascii_whitespace);
    let word = |at: usize| after(blank(at), |byte| byte.is_ascii_alphanumeric() || *byte == b'_' || *byte >= 128);
    let begin = after(blank(at), |byte| matches!(byte, b'+' | b'-'));
    let mut end = match bytes.get(begin) {
        Some(b'"' | b'\'') => string_end(text, begin),
        Some(b'(' | b'[' | b'{') => group_end(text, begin),
        _ => word(begin),
    };
    loop {
        let next = blank(end);
        end = match bytes.get(next) {
            Some(b'.' | b'|') => word(next + 1),
            Some(b'(' | b'[') => group_end(text, next),
            _ => return end,
        };
    }
}

/// The end of the quoted text that begins at `at`.
pub(super) fn string_end(text: &str, at: usize) -> usize {
    let bytes = text.as_bytes();
    let quote = bytes[at];
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != quote {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    (end + 1).min(bytes.len())
}

/// The end of the brackets that open at `at`.
fn group_end(text: &str, at: usize) -> usize {
    let bytes = text.as_bytes();
    let mut end = at;
    let mut open = 0;
    while end < bytes.len() {
        match bytes[end] {
            b'"' | b'\'' => {
                end = string_end(text, end);
                continue;
            }
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open -= 1,
            _ => {}
        }
        end += 1;
        if open == 0 {
            break;
        }
    }
    end
}

#[cfg(test)]
mod tests {
    use super::super::template::{Conversation, Template, TemplateTokens};
    use super::*;

    const MESSAGES: &str = r#"[{"role": "user", "content": "\u001c\u001f x\u001dy \u001e\u0085", "n": [1e-05, 1e-07,
        18446744073709551616, 10000000000000000000000000, 1e25, -9223372036854775809, 1.0, -0.0, 0.1, 123456789012345678]}]"#;

    fn rendered(source: &str) -> String {
        let template = Template::new(source, "model", TemplateTokens::default()).unwrap();
        template.render(&Conversation::from_json(MESSAGES).unwrap(), None, false).unwrap().text
    }

    /// The expected texts are from transformers 5.23 with Jinja 3.1.6.
    #[test]
    fn templates_give_the_text_of_jinja_in_python() {
        for (source, expected) in [
            (
                "{{ 1e20 }} {{ 1e-5 }} {{ 1e16 }} {{ 0.0001 }} {{ 1e15 }} {{ -2.5e-7 }}",
                "1e+20 1e-05 1e+16 0.0001 1000000000000000.0 -2.5e-07",
            ),
            (
                "{{ messages[0].n | tojson }}",
                "[1e-05, 1e-07, 18446744073709551616, 10000000000000000000000000, 1e+25, -9223372036854775809, 1.0, -0.0, 0.1, \
                 123456789012345678]",
            ),
            (
                "{{ 2 ** 64 }} {{ (10 ** 25) | tojson }} {{ 18446744073709551616 | tojson }}",
                "18446744073709551616 10000000000000000000000000 18446744073709551616",
            ),
            (
                "[{{ messages[0].content | trim }}] [{{ messages[0].content.strip() }}] [{{ messages[0].content.lstrip() }}] \
                 {{ messages[0].content.split() | length }} [{{ 'xax' | trim('x') }}]",
                "[x\x1Dy] [x\x1Dy] [x\x1Dy \x1E\u{85}] 2 [a]",
            ),
            (
                "{{ '%s is %d, %.2f%%' % ('é', 3, 2.5) }}|{{ '%s' % messages[0].role }}|{{ '%02d:%02d' % (7, 5 % 3) }}|\
                 {{ 7 % 4 }}|{{ 2 * 7 % 4 }}|{% set f = '<%s>' %}{{ f % 'a' | upper }}|{{ ('%s' ~ '!') % 1e20 }}|\
                 {{ '%(a)s' % {'a': 1} }}|{{ -7 % 4 }}|{% if messages|length % 2 == 1 %}odd{% endif %}|{{ '%' }}|\
                 {% raw %}{{ 'a' % 'b' }}{% endraw %}|{{ '%s %s' % ('a', 'b') + 'c' }}|{# % #}|{{ '%s' % [1, 2] }}|{{ '%s' % {'a': 1} }}",
                "é is 3, 2.50%|user|07:02|3|2|<A>|1e+20!|1|1|odd|%|{{ 'a' % 'b' }}|a bc||[1, 2]|{'a': 1}",
            ),
            (
                "{% for it in [none, '', [], {}, 1, missing] %}{{ it is iterable }} {{ it is sequence }} {% endfor %}",
                "False False True True True True True True False False True True ",
            ),
            (r#"{% set it = {'k': 4} %}{{ 5 * it["k"] % 3 }}"#, "2"),
            (r#"{{ "<\"'&>" | e | e }} {{ [1, '2'] | escape }}"#, "&lt;&#34;&#39;&amp;&gt; [1, &#39;2&#39;]"),
            ("{{ 'aab'.removeprefix('a') }} {{ 'abb'.removesuffix('b') }} {{ 'a'.removeprefix('b') }}", "ab ab a"),
            ("{{ 1e20 | string }} {{ 'x' ~ 1.5 }} {{ 1.0 }} {{ [1, 'a'] }}", "1e+20 x1.5 1.0 [1, 'a']"),
            (
                r#"{{ {'a': [1e20, none, true], 2: ('é',)} }} {{ () }} {{ [[], {}, (1, 2)] | string }} {{ ["'", '"', '\'"\\\n'] }}"#,
                r#"{'a': [1e+20, None, True], 2: ('é',)} () [[], {}, (1, 2)] ["'", '"', '\'"\\\n']"#,
            ),
            (
                "{{ ['\u{A0}e\u{301}\u{301}', '👨\u{200D}👩', '\u{FEFF}', '\u{10FFFF}', '\u{301}', ' \u{0}'] }}",
                "['\\xa0e\u{301}\u{301}', '👨\\u200d👩', '\\ufeff', '\\U0010ffff', '\u{301}', ' \\x00']",
            ),
            (
                "{{ '{\n' | indent(2, first=True) }}|{{ '' | indent(1, true) }}|{{ 'a\n\nb\n' | indent }}|\
                 {{ 'a\u{2028}b\r\n' | indent('> ', blank=true) }}|{{ 'a\n\n' | indent(width=1, first=true) }}",
                "  {\n| |a\n\n    b\n|a\n> b\n> | a\n\n",
            ),
            ("{{ {'a': 'é'} | tojson(ensure_ascii=False) }} {{ documents is defined }}", "{\"a\": \"é\"} True"),
            ("{{ {'é': '\"é😀\x7F'} | tojson(ensure_ascii=True) }}", r#"{"\u00e9": "\"\u00e9\ud83d\ude00\u007f"}"#),
            (
                "{{ {'b': [1, 2], 'a': {'d': none, 'c': true}} | tojson(separators=(',', ':'), sort_keys=True) }}",
                r#"{"a":{"c":true,"d":null},"b":[1,2]}"#,
            ),
            (
                "{{ {'b': [1], 'a': 2} | tojson(indent=1) }} {{ [[], {}] | tojson(indent=0) }}",
                "{\n \"b\": [\n  1\n ],\n \"a\": 2\n} [\n[],\n{}\n]",
            ),
            ("{{ ['é', 1] | tojson(true, none, ('; ', '')) }}", r#"["\u00e9"; 1]"#),
            ("{{ {2: none, true: 1.5} | tojson }}", r#"{"2": null, "true": 1.5}"#),
            (
                "{{ [][::-1] }}{{ ''[::-1] }}{{ messages[1:][::-1] }}{{ ()[::-1] }} {{ 'abc'[5:0:-1] }} {{ [1][-5::-1] }}",
                "[][]() cb []",
            ),
            (
                "{{ 'a b  c '.split(none, 1) }} {{ 'a.b.c'.split('.', maxsplit=1) }} {{ 'a.b.c'.rsplit(sep='.', maxsplit=1) }} \
                 {{ ' a b '.rsplit() }} {{ ['a', 'b'].index('b') }}",
                "['a', 'b  c '] ['a', 'b.c'] ['a.b', 'c'] ['a', 'b'] 1",
            ),
            (
                "{{ 'x' | int }} {{ '' | int(5) }} {{ 'x' | int(default=7) }} {{ '12' | int }} {{ 'x' | float }} {{ '1.5' | float(2.5) }}",
                "0 5 7 12 0.0 1.5",
            ),
            ("{{ ' 12 ' | int }} {{ '\n7' | int }} {{ ' 1.5 ' | float }} {{ ' x' | int(9) }}", "12 7 1.5 9"),
            (
                r"{{ 'a\x85b\u2028c\x0bd\x0ce\x1cf\r\ng\n\n'.splitlines() }} {{ 'a\r\nb\n'.splitlines(true) }} {{ ''.splitlines() }}",
                r"['a', 'b', 'c', 'd', 'e', 'f', 'g', ''] ['a\r\n', 'b\n'] []",
            ),
        ] {
            assert_eq!(rendered(source), expected, "{source}");
        }
    }

    #[test]
    fn sources_without_the_operator_stay_as_they_are() {
        for source in [
            "{% if a %}{{ b }}{% endif %}",
            "100 % {",
            "{{ '%s' }",
            "{{ (",
            "{% raw %}{{ a % b }}",
            "{# {{ a % b }} #}",
            "{{ a % 2 }}",
        ] {
            assert_eq!(with_percent(source), source);
        }
        assert_eq!(with_percent("{{ a % b.c[0](1)|f - 1 }}"), "{{ a |python_percent( b.c[0](1)|f) - 1 }}");
        let deep = "{{ ".to_owned() + &"(a % ".repeat(5000);
        assert!(with_percent(&deep).len() < 3 * deep.len());
    }

    proptest::proptest! {
        #[test]
        fn any_source_is_passed_through(source in r#"[{}%#()'"\\a-c é|]{0,60}"#) {
            let changed = with_percent(&source).replace("|python_percent(", "%");
            proptest::prop_assert!(changed.len() <= 2 * source.len());
        }
    }
}
