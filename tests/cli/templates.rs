//! Conversations as they are trained on, token by token against transformers' `apply_chat_template`: texts of the
//! templates that models are published with, and masks of our training templates.

use crate::common::python::{python, run_script};
use finetune::Error;
use finetune::data::{
    ChatFormat, Conversation, DataSource, DatasetBuilder, DatasetOptions, IGNORE_INDEX, LossOn, Rendered,
    TemplateTokens, Tokenizer, named_template,
};
use serde_json::{Value, json};
use std::path::Path;

/// Published templates by TRL's names, with the training template that belongs to each.
const FAMILIES: [(&str, &str); 10] = [
    ("qwen2_5", "qwen2.5"),
    ("qwen3", "qwen3"),
    ("qwen3_instruct_2507", "qwen3-2507"),
    ("llama3", "llama3"),
    ("llama3_1", "llama3.1"),
    ("gemma3", "gemma3"),
    ("gemma", "gemma3"),
    ("phi3", "phi3"),
    ("phi3_5", "phi3"),
    ("gptoss", HARMONY),
];

/// gpt-oss's text shows the answers itself.
const HARMONY: &str = "the messages of the Harmony format";

/// SmolLM2's template, from its model file.
const SMOLLM2: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful \
     AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + \
     message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn say(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// System first or not, two users in a row, empty answers, unicode, tools, thoughts.
fn conversations() -> Vec<Value> {
    let tools = json!([{"type": "function", "function": {"name": "add", "description": "adds <&>", "parameters": {
        "type": "object", "properties": {"y": {"type": "integer"}, "x": {"type": "integer", "description": "é"}}}}}]);
    let call = json!({"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"y": 2, "x": 1, "note": "ü \"q\""}}}]});
    let case = |messages: Value, tools: Value| json!({"messages": messages, "tools": tools});
    vec![
        case(json!([say("user", "Hi"), say("assistant", "Hello!")]), Value::Null),
        case(
            json!([
                say("system", "Täglich \"kurz\" 你好"),
                say("user", "a\nb\n"),
                say("assistant", ""),
                say("user", " c "),
                say("assistant", " the end\n")
            ]),
            Value::Null,
        ),
        case(json!([say("user", "one"), say("user", "two"), say("assistant", "so 🙂")]), Value::Null),
        case(
            json!([
                say("user", "x"),
                say("assistant", "<think>\nhm\n</think>\n\nso 🙂"),
                say("user", "y"),
                say("assistant", "<think>\nwell\n</think>\n\n12")
            ]),
            Value::Null,
        ),
        case(json!([say("user", "1+2?"), {"role": "assistant", "reasoning": "count", "content": "3"}]), Value::Null),
        case(
            json!([say("user", "{{ not a template }} {% nor this %}"), say("assistant", "<b>&amp;</b> 'quoted'\n\n")]),
            Value::Null,
        ),
        case(json!([say("system", "s"), say("assistant", "I begin"), say("user", "u")]), Value::Null),
        case(json!([say("user", "1+2?"), call, say("tool", "3"), say("assistant", "It is 3.")]), tools.clone()),
        case(json!([say("system", "Use tools."), say("user", "1+2?"), say("assistant", "3")]), tools),
        case(json!([say("user", "only a question")]), Value::Null),
    ]
}

/// A byte-level tokenizer with the families' special tokens and some merges that reach over the edges of answers.
fn tokenizer() -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(Tokenizer::byte().json()).unwrap();
    json["pre_tokenizer"]["use_regex"] = true.into();
    let mut next = 257;
    for merge in ["Ċ Ċ", "Ġ t", "h e", "Ġt he", "i n", "l l", "! Ċ"] {
        json["model"]["merges"].as_array_mut().unwrap().push(merge.into());
        json["model"]["vocab"][merge.replace(' ', "")] = next.into();
        next += 1;
    }
    json["model"]["vocab"]["!!"] = 256.into();
    let names = [
        "<|endoftext|>",
        "<s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
    ];
    let special = names.iter().enumerate().map(|(i, name)| {
        json!({"id": next + i, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    });
    json["added_tokens"] = special.collect();
    json.to_string().into_bytes()
}

fn tokens() -> TemplateTokens {
    TemplateTokens { bos: Some("<s>".into()), eos: Some("<|endoftext|>".into()) }
}

fn built_in(name: &str) -> String {
    named_template(name).unwrap()
}

/// The ids and the mask that training has of one conversation.
fn trained(folder: &Path, tokenizer: &Tokenizer, case: &Value, chat: ChatFormat) -> (Vec<u32>, Vec<u32>) {
    let path = folder.join("case.jsonl");
    let mut row = json!({"messages": case["messages"]});
    if !case["tools"].is_null() {
        row["tools"] = case["tools"].clone();
    }
    std::fs::write(&path, row.to_string()).unwrap();
    let options = DatasetOptions { chat, loss_on: LossOn::Answers, ..DatasetOptions::default() };
    let (source, _) = DatasetBuilder { options, ..DatasetBuilder::new(folder) }
        .load_unsplit(&DataSource::Path(path), tokenizer)
        .unwrap();
    let (mut ids, mut targets) = (vec![0; source.len()], vec![0; source.len()]);
    source.read(0, &mut ids);
    source.read_labels(0, &mut targets);
    (ids, targets.into_iter().map(|target| u32::from(target != IGNORE_INDEX)).collect())
}

/// Whether a template was refused because it does not write tool calls, which transformers passes over.
fn drops_calls(error: &Error, theirs: &Value) -> bool {
    let writes_calls = theirs["text"].as_str().is_some_and(|text| text.contains("arguments"));
    error.to_string().contains("does not write tool calls") && !writes_calls
}

#[test]
fn conversations_have_the_tokens_and_the_masks_that_transformers_gives_them() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let names = FAMILIES.iter().map(|(_, name)| *name).filter(|name| *name != HARMONY);
    let training: Vec<&str> = names.chain(["chatml", "smollm2", "plain"]).collect();
    let sources: serde_json::Map<String, Value> =
        training.iter().map(|name| ((*name).to_owned(), built_in(name).into())).collect();
    let cases = json!({
        "published": FAMILIES.map(|(name, _)| name), "training": sources, "conversations": conversations(),
    });
    let (file, tokens_file) = (folder.path().join("cases.json"), folder.path().join("tokenizer.json"));
    std::fs::write(&file, cases.to_string()).unwrap();
    std::fs::write(&tokens_file, tokenizer()).unwrap();
    let found = run_script(&python, "chat_tokens.py", &[file.as_os_str(), tokens_file.as_os_str()]);
    let tokenizer = Tokenizer::from_file(&tokens_file).unwrap();
    let results = found["results"].as_array().unwrap();
    let (mut same_texts, mut same_masks, mut refusals) = (0, 0, 0);
    for (case, result) in conversations().iter().zip(results) {
        let conversation = Conversation::from_json(&case["messages"].to_string()).unwrap();
        let variables = json!({"tools": case["tools"]}).to_string();
        let variables: minijinja::Value = serde_json::from_str(&variables).unwrap();
        for (published, name) in FAMILIES {
            let theirs = &result["published"][published];
            let chat = ChatFormat::new(found["published"][published].as_str().unwrap(), published, &tokens());
            let training = format!("the training template `{name}`");
            assert_eq!(chat.name, if name == HARMONY { name } else { &training });
            match chat.render(&conversation, Some(&variables), false) {
                Ok(rendered) => {
                    assert_eq!(rendered.text, theirs["text"], "{published}: {case}");
                    if name == HARMONY {
                        assert_harmony(&rendered, case);
                    }
                    same_texts += 1;
                }
                Err(error) => {
                    assert!(
                        drops_calls(&error, theirs) || !theirs["refused"].is_null(),
                        "{published}: {case}: {error}"
                    );
                    refusals += 1;
                }
            }
        }
        for name in &training {
            let theirs = &result["training"][name];
            let chat = ChatFormat::new(&built_in(name), name, &tokens());
            if !theirs["refused"].is_null() || !theirs["learned"].as_array().unwrap().contains(&1.into()) {
                continue;
            }
            if chat.render(&conversation, Some(&variables), false).is_err_and(|error| drops_calls(&error, theirs)) {
                continue;
            }
            let (ids, learned) = trained(folder.path(), &tokenizer, case, chat);
            assert_eq!(
                (json!(ids), json!(learned)),
                (theirs["ids"].clone(), theirs["learned"].clone()),
                "{name}: {case}"
            );
            same_masks += 1;
        }
    }
    assert!(
        same_texts >= 40 && same_masks >= 50 && refusals >= 3,
        "{same_texts} texts, {same_masks} masks, {refusals} refusals"
    );
}

/// The loss tokens of a Harmony text are all messages of the assistant after their start, with their ends.
fn assert_harmony(rendered: &Rendered, case: &Value) {
    let answers = rendered.text.split("<|start|>").filter_map(|part| part.strip_prefix("assistant"));
    let learned = rendered.assistant_ranges.iter().map(|range| &rendered.text[range.clone()]);
    // Thoughts and their answer are one range.
    let learned = learned.flat_map(|range| range.split("<|start|>assistant"));
    assert_eq!(learned.collect::<Vec<_>>(), answers.collect::<Vec<_>>(), "{case}");
}

#[test]
fn thoughts_and_answers_in_harmony_are_one_answer() {
    let template = "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.thinking %}{{ '<|channel|>analysis<|message|>' + \
        m.thinking + '<|end|><|start|>' + m.role }}{% endif %}{{ '<|channel|>final<|message|>' + m.content + '<|return|>' }}{% endfor %}";
    let chat = ChatFormat::new(template, "model", &tokens());
    assert_eq!(chat.name, HARMONY);
    let render = |answer: &str| {
        let answer = json!([say("user", "a"), {"role": "assistant", "thinking": "t", "content": answer}]);
        chat.render(&Conversation::from_json(&answer.to_string()).unwrap(), None, false)
    };
    let Rendered { text, assistant_ranges } = render("b").unwrap();
    let learned: Vec<&str> = assistant_ranges.into_iter().map(|range| &text[range]).collect();
    let whole = "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>";
    assert_eq!(learned, [whole]);
    for answer in ["<|start|>assistant", "b<|end|>c", "b<|return|>c", "b<|call|>c"] {
        let message = render(answer).unwrap_err().to_string();
        assert!(message.contains("a message or a tool contains `<|start|>`"), "{message}");
    }
    let question = json!([say("user", "a<|end|>"), say("assistant", "b")]);
    assert!(chat.render(&Conversation::from_json(&question.to_string()).unwrap(), None, false).is_ok());
}

#[test]
fn smollm2s_template_is_known_by_what_it_does() {
    let chat = ChatFormat::new(SMOLLM2, "model", &tokens());
    assert_eq!(chat.name, "the training template `smollm2`");
    let conversation = Conversation::from_json(&conversations()[1]["messages"].to_string()).unwrap();
    let rendered = chat.render(&conversation, None, false).unwrap();
    let learned: Vec<&str> = rendered.assistant_ranges.into_iter().map(|range| &rendered.text[range]).collect();
    assert_eq!(learned, ["<|im_end|>", " the end\n<|im_end|>"]);
}

#[test]
fn a_template_whose_answers_cannot_be_told_apart_is_refused() {
    let chat = ChatFormat::new("{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}", "odd", &tokens());
    let conversation = Conversation::from_json(r#"[{"role": "user", "content": "a"}]"#).unwrap();
    let message = chat.render(&conversation, None, false).unwrap_err().to_string();
    assert!(message.contains("odd: its chat template has no `{% generation %}` blocks"), "{message}");
    assert_eq!(chat.render(&conversation, None, true).unwrap().text, "user> a\n");
    // If a template differs from another one only for some conversations, the first of these reveals the difference.
    let source = built_in("chatml").replace("{%- generation %}", "").replace("{%- endgeneration %}", "");
    let chat = ChatFormat::new(
        &source
            .replace("{{- message.role", "{{- ('>' if 'x' in message.content) ~ message.role")
            .replace("message.content + '<|im_end|>\\n'", "message.content | replace('x', 'y') + '<|im_end|>\\n'"),
        "like",
        &tokens(),
    );
    assert_eq!(chat.name, "the training template `chatml`");
    let conversation =
        Conversation::from_json(r#"[{"role": "user", "content": "x"}, {"role": "assistant", "content": "b"}]"#)
            .unwrap();
    let message = chat.render(&conversation, None, false).unwrap_err().to_string();
    assert!(message.contains("writes") && message.contains("`chatml`, which locates the answers"), "{message}");
}

/// A template may use a method that the engine lacks.
#[test]
fn a_template_that_fails_on_tool_calls_is_refused_with_its_own_reason() {
    let chat = ChatFormat::new("{{ messages[0].content.encode() }}", "like", &tokens());
    let conversation = Conversation::from_json(
        r#"[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]"#,
    )
    .unwrap();
    let message = chat.render(&conversation, None, true).unwrap_err().to_string();
    assert!(
        message.contains("does not write tool calls (its chat template, line 1: string has no method named encode)"),
        "{message}"
    );
}

/// Qwen 3's template writes nothing for such an answer.
#[test]
fn a_template_that_leaves_out_answers_in_parts_is_refused() {
    let parts = Conversation::from_json(
        r#"[{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "thinking", "thinking": "y"}]}]"#,
    )
    .unwrap();
    for name in ["qwen3", "chatml"] {
        let chat = ChatFormat::new(&built_in(name), name, &tokens());
        let message = chat.render(&parts, None, false).unwrap_err().to_string();
        assert!(message.contains("does not write answers in parts"), "{name}: {message}");
    }
    let source = "{% for m in messages %}{% for p in m.content %}{{ p.text or p.thinking }}{% endfor %}{% endfor %}";
    assert_eq!(ChatFormat::new(source, "parts", &tokens()).render(&parts, None, true).unwrap().text, "y");
}

/// Every probe counts: a template that writes `chatml`'s text except for system messages or tools' answers is another
/// one.
#[test]
fn a_template_that_differs_in_one_role_is_not_taken_for_a_built_in_one() {
    let source = built_in("chatml").replace("{%- generation %}", "").replace("{%- endgeneration %}", "");
    for role in ["none", "system", "tool"] {
        let start = format!("{{{{- ('>' if message.role == '{role}' else '') + '<|im_start|>' + message.role");
        let changed = source.replace("{{- '<|im_start|>' + message.role", &start);
        let name = if role == "none" { "the training template `chatml`" } else { "nothing" };
        assert_ne!(changed, source);
        assert_eq!(ChatFormat::new(&changed, "like", &tokens()).name, name, "{role}");
    }
}
