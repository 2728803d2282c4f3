//! Chat templates compared with transformers, and `finetune chat` as a user runs it.

use crate::common::cli_fixture::CliFixture;
use crate::common::launch;
use crate::common::python::{python, run_script};
use finetune::data::{Conversation, Template, TemplateTokens};
use serde_json::{Value, json};
use std::io::Write;
use std::process::Stdio;

/// Templates like the families' templates, each with the constructs that they use.
const TEMPLATES: [(&str, &str); 6] = [
    (
        "chatml",
        "{%- if messages[0]['role'] != 'system' %}\n{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}\n{%- endif %}\n\
         {%- for message in messages %}\n  {%- if message.role == 'assistant' %}\n    {{- '<|im_start|>assistant\\n' }}\
         {% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}\n  {%- else %}\n    \
         {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n  {%- endif %}\n\
         {%- endfor %}\n{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    ),
    (
        "headers",
        "{{ bos_token }}{% set ns = namespace(first=true) %}\n{% for m in messages %}\n    {% if m.role == 'tool' %}\n{{ m | tojson }}\n\
         {% else %}\n<h>{{ m['role'] | upper }}</h>\n\n{{ m['content'] | trim }}{{ eos_token }}\n    {% endif %}\n\
         {% set ns.first = false %}\n{% endfor %}\n{{ ns.first }}{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}\n",
    ),
    (
        "strict",
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set intro = messages[0].content + '\\n\\n' %}\
         {% set turns = messages[1:] %}{% else %}{% set intro = '' %}{% set turns = messages %}{% endif %}\
         {% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
         {{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'assistant' %}{% set who = 'model' %}{% else %}\
         {% set who = m.role %}{% endif %}<t>{{ who }}\n{{ (intro if loop.first else '') + m.content.strip() }}</t>\n{% endfor %}\
         {% if add_generation_prompt %}<t>model\n{% endif %}",
    ),
    (
        "numbers",
        "{{ 1e20 }} {{ 1e-7 }} {{ 0.1 }} {{ messages | tojson }} {{ '%s is %d, %.2f%%' % ('é', 3, 2.5) }}\
         {% for m in messages %}{{ '%s' % m.role }}: [{{ m.content | trim }}] {{ loop.index0 % 2 }}{{ loop.index % loop.length }}\
         {{ m.content.rstrip() }}|{% endfor %}",
    ),
    (
        "thoughts",
        "{% for m in messages %}{% set text = m.content %}{% if '</think>' in text %}\
         {% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ loop.index }}/{{ loop.length }} {{ m.role.title() }}: \
         {{ text | replace('a', 'A') }}{% if not loop.last %}; {% endif %}{% endfor %}",
    ),
    (
        "methods of texts",
        "{{ nothing | length }}{% for m in messages %}{{ (m.content ~ \"it's a,b d1e DÉF 你a\").title() }} \
         {{ m.content | replace('\\n', '/', 1) }} {{ m.content.rsplit(' ', 1) }} {{ m.content.rsplit('l') }}{% endfor %}",
    ),
];

/// System first or not, two users in a row, empty answers, unicode, line ends.
fn conversations() -> Vec<Value> {
    let say = |role: &str, content: &str| json!({"role": role, "content": content});
    vec![
        json!([say("user", "Hi"), say("assistant", "Hello!")]),
        json!([
            say("system", "Täglich \"kurz\" 你好"),
            say("user", "a\nb\n"),
            say("assistant", ""),
            say("user", " c ")
        ]),
        json!([say("user", "one"), say("user", "two"), say("assistant", "<think>\nhm\n</think>\n\nso 🙂")]),
        json!([say("user", "{{ not a template }} {% nor this %}"), say("assistant", "<b>&amp;</b> 'quoted'")]),
        json!([{"role": "user", "content": "\u{1C}\u{1F} a \u{1D}\u{85}", "n": [1e-5, 1e-7, 2.0, 1e20, "@2^64@", "@10^25@"]}]),
        json!([say("user", "x"), {"role": "assistant", "content": "ok", "z": 1, "a": [true, null, 2.5]}, say("tool", "7 é")]),
    ]
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "add", "parameters": {"y": 1, "x": {"é": ["<&>"]}}}}])
}

/// JSON with whole numbers that `Value` cannot hold.
fn text_of(value: &Value) -> String {
    value.to_string().replace("\"@2^64@\"", "18446744073709551616").replace("\"@10^25@\"", "10000000000000000000000000")
}

#[test]
fn templates_give_the_text_that_transformers_gives() {
    let Some(python) = python() else { return };
    let mut cases = Vec::new();
    for (name, source) in TEMPLATES {
        for conversation in conversations() {
            for reply in [false, true] {
                for tools in [None, Some(tools())] {
                    cases.push(json!({"name": name, "template": source, "messages": conversation, "tools": tools, "reply": reply}));
                }
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cases.json");
    std::fs::write(&file, text_of(&json!(cases))).unwrap();
    let expected: Vec<Value> =
        serde_json::from_value(run_script(&python, "chat_templates.py", &[file.as_os_str()])).unwrap();
    assert_eq!(expected.len(), cases.len());
    let (mut texts, mut refusals) = (0, 0);
    for (case, expected) in cases.iter().zip(&expected) {
        let tokens = TemplateTokens { bos: Some("<s>".into()), eos: Some("</s>".into()) };
        let template = Template::new(case["template"].as_str().unwrap(), "model", tokens).unwrap();
        let conversation = Conversation::from_json(&text_of(&case["messages"])).unwrap();
        let variables: minijinja::Value = serde_json::from_value(json!({"tools": case["tools"]})).unwrap();
        match template.render(&conversation, Some(&variables), case["reply"] == true) {
            Ok(rendered) => {
                assert_eq!(rendered.text, expected["text"], "{case}");
                texts += 1;
                // Offsets in characters, as in transformers.
                let learned: Vec<[usize; 2]> = rendered
                    .assistant_ranges
                    .iter()
                    .map(|range| [range.start, range.end].map(|at| rendered.text[..at].chars().count()))
                    .collect();
                if case["name"] == "chatml" {
                    assert_eq!(json!(learned), expected["learned"], "{case}");
                }
            }
            Err(error) => {
                assert!(
                    error.to_string().contains("roles must alternate") && expected["refused"] == true,
                    "{case}: {error}"
                );
                refusals += 1;
            }
        }
    }
    assert!(texts > 50 && refusals > 3, "{texts} texts and {refusals} refusals");
}

/// A folder with a model whose template is this.
fn fixture(template: Option<&str>) -> CliFixture {
    let fixture = CliFixture::new();
    if let Some(template) = template {
        fixture.write("model/tokenizer_config.json", json!({"chat_template": template}).to_string());
    }
    fixture
}

/// Standard output and standard error of a conversation with these lines.
fn chat(fixture: &CliFixture, lines: &[&str]) -> (String, String) {
    let mut child =
        fixture.command("chat model -n 4 --temperature 0 --threads 1").stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all((lines.join("\n") + "\n").as_bytes()).unwrap();
    let (code, out, err) = launch::texts(child.wait_with_output().unwrap());
    assert_eq!(code, Some(0), "{err}");
    (out, err)
}

#[test]
fn a_conversation_is_held_saved_and_restarted() {
    let fixture = fixture(Some("{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}"));
    let lines = [
        "a",
        "/save talk.jsonl",
        "/nonsense",
        "b",
        "/save",
        "/reset",
        "/save talk.jsonl",
        "/system s",
        "c",
        "/save talk.jsonl",
    ];
    let (answers, notes) = chat(&fixture, &lines);
    assert_eq!(
        answers.matches('\n').count() - answers.matches("\n\n").count(),
        3,
        "one answer a question: {answers:?}"
    );
    assert!(notes.contains("unknown command `/nonsense`") && notes.contains("`/save` needs a file name"), "{notes}");
    let saved = std::fs::read_to_string(fixture.path("talk.jsonl")).unwrap();
    let roles: Vec<Vec<String>> = saved
        .lines()
        .map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            line["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap().to_owned()).collect()
        })
        .collect();
    // Regression: a conversation without an answer was saved too, and made the file useless as data.
    assert_eq!(roles, [vec!["user", "assistant"], vec!["system", "user", "assistant"]]);
}

#[test]
fn messages_rejected_by_the_template_or_the_context_are_dropped() {
    let fixture = fixture(Some(
        "{% if messages|length > 1 %}{{ raise_exception('too\u{1b} long') }}{% endif %}{{ messages[0].content }}",
    ));
    let long = "x".repeat(400);
    let (_, notes) = chat(&fixture, &[&long, "a", "b", "/save talk.jsonl"]);
    assert!(
        notes.contains("/reset restarts it") && notes.contains("line 1: too") && !notes.contains('\u{1b}'),
        "{notes}"
    );
    assert!(notes.contains("saved 2 messages to `talk.jsonl`"), "{notes}");
}

#[test]
fn an_endless_line_is_refused() {
    let fixture = fixture(None);
    let mut command = fixture.command("chat model -n 4 --threads 1");
    command.stdin(std::fs::File::open("/dev/zero").unwrap());
    let (code, _, complaint) = launch::texts(command.spawn().unwrap().wait_with_output().unwrap());
    assert!(code == Some(2) && complaint.contains("standard input: a line has 1 MiB or more"), "{complaint}");
}

/// Starts a chat on a pseudo-terminal after `prepare`, drives it by `script`, and prints its exit code, or minus its
/// signal. Both are Python.
fn chat_on_terminal(prepare: &str, script: &str) -> Option<String> {
    let fork = r#"
import os, pty, signal, sys
pid, terminal = pty.fork()
if pid == 0:
    os.environ["TERM"] = "xterm"
    os.system("stty rows 24 columns 80")
    "#;
    let begin = r#"
    os.execvp(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
signal.alarm(120)
def wait(text):
    seen = b""
    while text not in seen:
        seen += os.read(terminal, 4096)
"#;
    let end = "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))";
    let fixture = fixture(None);
    let mut command = launch::command(python()?);
    command.args([
        "-c",
        &[fork, prepare, begin, script, end].concat(),
        env!("CARGO_BIN_EXE_finetune"),
        "chat",
        "model",
    ]);
    Some(launch::succeed(command.current_dir(fixture.folder())))
}

/// Regression: the chat ended, with its conversation, at the first message.
#[test]
fn a_terminal_that_does_not_answer_gives_plain_lines() {
    let script = r#"
wait(b"plain lines")
os.write(terminal, b"/help\n")
wait(b"/regenerate")
os.write(terminal, b"/quit\n")
"#;
    assert!(chat_on_terminal("", script).is_none_or(|code| code == "0\n"));
}

/// Regression: control sequences were written into the file, and the chat ended.
#[test]
fn answers_can_go_to_a_file() {
    let redirect = "os.dup2(os.open('answers', os.O_CREAT | os.O_WRONLY), 1)";
    let script = r#"
wait(b"> ")
assert os.path.getsize("answers") == 0
os.write(terminal, b"/quit\n")
"#;
    assert!(chat_on_terminal(redirect, script).is_none_or(|code| code == "0\n"));
}

/// Waits for the editor of a chat on a pseudo-terminal, and answers its query for the cursor's position.
const EDIT: &str = r#"
wait(b"\x1b[6n")
os.write(terminal, b"\x1b[1;1R")
wait(b"lists the commands")
"#;

/// Regression: a pasted message controlled the terminal when it was shown again.
#[test]
fn a_message_is_shown_without_control_characters() {
    let paste = r#"
os.write(terminal, b"\x1b[200~/unknown \x1b[31m\x1b[201~\r")
wait(b"> /unknown \\u001b[31m")
os.kill(pid, signal.SIGTERM)
"#;
    assert!(chat_on_terminal("", &[EDIT, paste].concat()).is_none_or(|code| code == "-15\n"));
}

/// Regression: a chat whose terminal was closed kept a core busy for ever, and one that read half of a paste did not
/// end.
#[test]
fn a_chat_that_waits_for_keys_ends_with_its_terminal_or_by_a_signal() {
    let close = "os.close(terminal)\n";
    // It sees the end of its input, or the signal first.
    assert!(chat_on_terminal("", &[EDIT, close].concat()).is_none_or(|code| code == "-1\n" || code == "0\n"));
    // Only a controlling terminal sends a signal.
    let detach = "import fcntl, termios; signal.signal(1, signal.SIG_IGN); fcntl.ioctl(0, termios.TIOCNOTTY); \
                  signal.signal(1, signal.SIG_DFL)";
    assert!(chat_on_terminal(detach, &[EDIT, close].concat()).is_none_or(|code| code == "0\n"));
    let paste = r#"
import termios, time
os.write(terminal, b"\x1b[200~half")
time.sleep(0.3)
os.kill(pid, signal.SIGTERM)
wait(b"\x1b[?2004l")
assert termios.tcgetattr(terminal)[3] & termios.ECHO
"#;
    assert!(chat_on_terminal("", &[EDIT, paste].concat()).is_none_or(|code| code == "-15\n"));
}

#[test]
fn without_a_template_turns_are_lines_and_a_notice_says_so() {
    let fixture = fixture(None);
    let (_, notes) = chat(&fixture, &["hello"]);
    assert!(notes.contains("has no chat template"), "{notes}");
}
