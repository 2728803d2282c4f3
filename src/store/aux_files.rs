//! The small files stored with a model's weights that chat and generation need.

use crate::data::{Bos, ChatSettings, TemplateTokens, Tokenizer};
use crate::digest::{MAX_SMALL_FILE, read_at_most};
use crate::engine::model::ModelSpec;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Special tokens; in older models also the chat template.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Special tokens of older models whose `tokenizer_config.json` does not name them.
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
/// The tokens that end a text.
pub const GENERATION_CONFIG: &str = "generation_config.json";
/// The Jinja template of a chat.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// A second template, for conversations with tools.
pub const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

/// The auxiliary files of a model, byte for byte, with the path of each for error messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuxFiles(BTreeMap<&'static str, (PathBuf, Vec<u8>)>);

impl AuxFiles {
    /// The names of all auxiliary files.
    pub const NAMES: [&'static str; 4] = [TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION_CONFIG, CHAT_TEMPLATE];

    /// Reads the auxiliary files of a folder. Its template for tools becomes a part of [`CHAT_TEMPLATE`].
    pub fn of_folder(folder: &Path) -> Result<Self> {
        let mut found = Self::default();
        for name in Self::NAMES {
            let path = folder.join(name);
            if path.is_file() {
                let bytes = read_at_most(&path, MAX_SMALL_FILE)?;
                found.0.insert(name, (path, bytes));
            }
        }
        let tools = folder.join(TOOL_TEMPLATE);
        if let Some((path, template)) = found.0.get_mut(CHAT_TEMPLATE).filter(|_| tools.is_file()) {
            let tool_use = utf8(&tools, read_at_most(&tools, MAX_SMALL_FILE)?)?;
            *template = either(&utf8(path, std::mem::take(template))?, &tool_use).into();
        }
        Ok(found)
    }

    /// Adds or replaces a file.
    pub fn insert(&mut self, name: &'static str, text: impl Into<Vec<u8>>) {
        self.0.insert(name, (name.into(), text.into()));
    }

    /// Each file's name and bytes.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.0.iter().map(|(name, (_, bytes))| (*name, bytes.as_slice()))
    }

    /// A file's bytes.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.get(name).map(|(_, bytes)| bytes.as_slice())
    }

    /// The chat template and its special tokens. The template is `chat_template.jinja`, or the one in
    /// `tokenizer_config.json`: a string, or the one named `default` in a list, with `tool_use` for conversations with
    /// tools. Fails with [`Error::Model`] for a file that is not UTF-8 or not JSON.
    pub fn chat(&self) -> Result<ChatSettings> {
        let config = self.json(TOKENIZER_CONFIG)?;
        let map = self.json(SPECIAL_TOKENS_MAP)?;
        let token = |key| special_token([&config, &map], key).map(str::to_owned);
        let template = if let Some((path, bytes)) = self.0.get(CHAT_TEMPLATE) {
            Some(utf8(path, bytes.clone())?)
        } else {
            let template = &config["chat_template"];
            let named = |name| template.as_array()?.iter().find(|entry| entry["name"] == name)?["template"].as_str();
            let default = template.as_str().or_else(|| named("default"));
            default.map(|default| named("tool_use").map_or_else(|| default.to_owned(), |tools| either(default, tools)))
        };
        Ok(ChatSettings { template, tokens: TemplateTokens { bos: token("bos_token"), eos: token("eos_token") } })
    }

    /// These files, replaced by those in `folder`. The chat template stays if `folder` has none.
    pub fn replaced_by(mut self, folder: &Path) -> Result<Self> {
        let own = Self::of_folder(folder)?;
        let template = own.chat()?.template.or(self.chat()?.template);
        self.0.extend(own.0);
        // Either configuration of a tokenizer may have a template inside.
        if self.chat()?.template != template
            && let Some(template) = template
        {
            self.insert(CHAT_TEMPLATE, template);
        }
        Ok(self)
    }

    /// These files for a model whose tokenizer is replaced by `tokenizer` from `file`: those in the folder of `file`
    /// replace them. The model's special tokens keep their meaning if the tokenizer has them and nothing else names
    /// any.
    pub fn with_tokenizer(mut self, tokenizer: &Tokenizer, file: &Path) -> Result<Self> {
        let (tokens, template) = (self.chat()?.tokens, self.chat()?.template);
        self.0.retain(|name, _| ![TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP].contains(name));
        if let Some(template) = template {
            self.insert(CHAT_TEMPLATE, template);
        }
        if let Some(folder) = file.parent().filter(|_| file != Path::new("bytes")) {
            self = self.replaced_by(folder)?;
        }
        let known = |token: Option<String>| token.filter(|token| tokenizer.id(token).is_some());
        let (bos, eos) = (known(tokens.bos), known(tokens.eos));
        let names_tokens = self.get(TOKENIZER_CONFIG).or(self.get(SPECIAL_TOKENS_MAP)).is_some();
        if !names_tokens && (bos.is_some() || eos.is_some()) {
            let mut config = tokenizer_config(&tokenizer.clone().with_eos(eos.as_deref()));
            config["bos_token"] = bos.into();
            self.insert(TOKENIZER_CONFIG, format!("{config:#}\n"));
        }
        Ok(self)
    }

    /// `tokenizer` with the `eos_token` of these files and the BOS token that `rule` determines; `id` is the one in
    /// `config.json`. If BOS differs from the one that `auto` determines, these files record it as `add_bos_token`.
    /// Fails like [`Tokenizer::with_bos`], and with [`Error::Model`] for a file that is not JSON.
    pub fn with_special_tokens(&mut self, tokenizer: Tokenizer, rule: Bos, id: Option<u32>) -> Result<Tokenizer> {
        let mut config = self.json(TOKENIZER_CONFIG)?;
        let map = self.json(SPECIAL_TOKENS_MAP)?;
        let tokenizer = tokenizer.with_eos(special_token([&config, &map], "eos_token"));
        let add = config["add_bos_token"].as_bool();
        let name = special_token([&config, &map], "bos_token");
        let published = tokenizer.clone().with_bos(Bos::Auto, add, name, id)?;
        let tokenizer = tokenizer.with_bos(rule, add, name, id)?;
        if tokenizer.bos() != published.bos() {
            if !config.is_object() {
                config = tokenizer_config(&tokenizer);
            }
            config["add_bos_token"] = tokenizer.bos().is_some().into();
            if let Some(token) = tokenizer.bos().and_then(|id| tokenizer.token(id)) {
                config["bos_token"] = token.into();
            }
            self.insert(TOKENIZER_CONFIG, format!("{config:#}\n"));
        }
        Ok(tokenizer)
    }

    /// The tokens that end a text: the tokenizer's own, and those of the model and of `generation_config.json` (one or
    /// a list).
    pub fn stop_token_ids(&self, spec: &ModelSpec, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let config = self.json(GENERATION_CONFIG)?;
        let ids = &config["eos_token_id"];
        let ids = ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice);
        let ids = ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok());
        let mut all = Vec::new();
        for id in tokenizer.eos_id().into_iter().chain(spec.eos_token_ids.iter().copied()).chain(ids) {
            if !all.contains(&id) {
                all.push(id);
            }
        }
        Ok(all)
    }

    fn json(&self, name: &str) -> Result<Value> {
        let Some((path, bytes)) = self.0.get(name) else { return Ok(Value::Null) };
        serde_json::from_slice(bytes).map_err(|error| Error::model(path.display(), format!("not JSON: {error}")))
    }
}

/// The text of a file.
fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|_| Error::model(path.display(), "not UTF-8"))
}

/// A template that writes conversations with tools like `tool_use`, and others like `default`.
fn either(default: &str, tool_use: &str) -> String {
    // A block removes the line feed after it and blanks before it; a template does not write its last line feed.
    let [default, tool_use] =
        [default, tool_use].map(|source| format!("\n{}{{{{ '' }}}}", source.strip_suffix('\n').unwrap_or(source)));
    format!("{{% if tools is defined and tools is not none %}}{tool_use}{{% else %}}{default}{{% endif %}}")
}

/// A special token in the first of these files that names it: a string or an object.
fn special_token<'a>(files: [&'a Value; 2], key: &str) -> Option<&'a str> {
    files.into_iter().find_map(|file| file[key].as_str().or_else(|| file[key]["content"].as_str()))
}

/// The `tokenizer_config.json` of a tokenizer that has none: what `AutoTokenizer` needs in addition to
/// `tokenizer.json`.
pub fn tokenizer_config(tokenizer: &Tokenizer) -> Value {
    let end = tokenizer.eos_id().and_then(|id| tokenizer.token(id));
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "bos_token": end,
        "eos_token": end,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{ChatFormat, Conversation};
    use minijinja::value::Serde;

    #[test]
    fn special_tokens_come_from_the_map_if_the_configuration_has_none() {
        let mut files = AuxFiles::default();
        files.insert(TOKENIZER_CONFIG, r#"{"bos_token": "a", "eos_token": null}"#);
        files.insert(SPECIAL_TOKENS_MAP, r#"{"bos_token": "b", "eos_token": {"content": "c"}}"#);
        let TemplateTokens { bos, eos } = files.chat().unwrap().tokens;
        assert_eq!([bos.as_deref(), eos.as_deref()], [Some("a"), Some("c")]);
        let letters = files.with_special_tokens(
            crate::data::tokenizer::tests::word_level(&["c", "</s>"], None, &json!({})),
            Bos::Auto,
            None,
        );
        assert_eq!(letters.unwrap().eos_id(), Some(0));
    }

    fn format(default: &str, tool_use: &str) -> ChatFormat {
        let named = |name: &str, template: &str| json!({"name": name, "template": template});
        let config = json!({"chat_template": [named("default", default), named("tool_use", tool_use)]});
        let mut files = AuxFiles::default();
        files.insert(TOKENIZER_CONFIG, config.to_string());
        files.chat().unwrap().format("model", &Tokenizer::byte())
    }

    /// As transformers chooses between two templates; both are written to the last blank.
    #[test]
    fn tools_select_the_template_for_tools() {
        let tool_use = "\n{% if true %}\n{{ tools[0] }}:{% endif %}{{ messages[0].content }}\n  ";
        let default = "  {% for m in messages %}\n{{ m.content }}\n\n  {%- endfor %}\n \n\n";
        let chat = Conversation::from_json(r#"[{"role": "user", "content": "a"}]"#).unwrap();
        for (variables, source) in
            [(json!({}), default), (json!({"tools": null}), default), (json!({"tools": ["t"]}), tool_use)]
        {
            let variables = minijinja::Value::from(Serde(variables));
            let render = |format: &ChatFormat| format.render(&chat, Some(&variables), true).unwrap().text;
            let one = ChatFormat::new(source, "model", &TemplateTokens::default());
            assert_eq!(render(&format(default, tool_use)), render(&one), "{variables}");
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        for (name, template) in [(CHAT_TEMPLATE, default), (TOOL_TEMPLATE, tool_use)] {
            std::fs::write(folder.path().join(name), template).unwrap();
        }
        let template = AuxFiles::of_folder(folder.path()).unwrap().chat().unwrap().template;
        assert_eq!(template, Some(either(default, tool_use)));
    }

    #[test]
    fn a_template_for_tools_does_not_hide_the_answers_of_others() {
        let chatml =
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}";
        let format = format(chatml, &format!("{{{{ tools }}}}{chatml}"));
        let chat = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]"#;
        let chat = Conversation::from_json(chat).unwrap();
        assert_eq!(format.render(&chat, None, false).unwrap().assistant_ranges.len(), 1);
        let tools = minijinja::Value::from(Serde(json!({"tools": ["t"]})));
        let message = format.render(&chat, Some(&tools), false).unwrap_err().to_string();
        assert!(message.contains("which locates the answers, writes"), "{message}");
    }
}
