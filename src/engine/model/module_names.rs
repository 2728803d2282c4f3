//! Names of modules with ranges of numbers, such as `h.0-3,wte`.

use super::spec::{ModelSpec, ModuleId};
use crate::{Error, Result};
use std::collections::BTreeSet;

/// Similar names in an error.
const SUGGESTIONS: usize = 3;

impl ModelSpec {
    /// The modules with parameters that the comma-separated `names` select. A name consists of whole parts of a
    /// module's name: `h.0-3` selects the blocks 0 to 3 of any family, `h.2.mlp` an MLP, `c_fc` a layer of every block.
    /// `key` is the setting. Fails with [`Error::Config`] for a name that matches nothing, with similar names.
    pub fn modules_named(&self, key: &str, names: &str) -> Result<BTreeSet<ModuleId>> {
        let modules: BTreeSet<ModuleId> = self.base_parameters().iter().map(|entry| entry.layer).collect();
        let mut found = BTreeSet::new();
        for name in names.split(',').map(str::trim) {
            let matching: Vec<_> = modules.iter().filter(|module| self.is_named(**module, name)).collect();
            if matching.is_empty() {
                let similar = self.similar_names(&modules, name).join("`, `");
                return Err(Error::config(
                    key,
                    format!("`{name}` matches no module of the model; similar: `{similar}`"),
                ));
            }
            found.extend(matching);
        }
        Ok(found)
    }

    /// Rejects `modules` that contain some, but not all modules of a fused tensor. `key` is the setting.
    pub(super) fn check_whole_products(&self, key: &str, modules: &BTreeSet<ModuleId>) -> Result<()> {
        let base = self.base_parameters();
        for entry in base.iter().filter(|entry| modules.contains(&entry.layer)) {
            let other =
                base.iter().find(|other| other.fused_into == entry.fused_into && !modules.contains(&other.layer));
            if let Some(other) = other {
                let names = [entry, other].map(|entry| self.layer_name(entry.layer));
                let message = format!("`{}` is fused with `{}`; list both or neither", names[0], names[1]);
                return Err(Error::config(key, message));
            }
        }
        Ok(())
    }

    /// This model with the modules frozen that `names` selects. `key` is the setting. Fails with [`Error::Config`] if
    /// `names` selects a part of a fused tensor, everything, or nothing.
    pub fn with_frozen(self, key: &str, names: &str) -> Result<Self> {
        let frozen = self.modules_named(key, names)?;
        self.check_whole_products(key, &frozen)?;
        let spec = Self { frozen, ..self };
        if spec.parameters().is_empty() {
            return Err(Error::config(key, format!("`{names}` freezes the whole model; leave a module to train")));
        }
        Ok(spec)
    }

    /// The name of a module, and its name with `h` for the list of blocks, as GPT-2 has it.
    fn names_of(&self, module: ModuleId) -> impl Iterator<Item = String> {
        let name = self.layer_name(module);
        let alias = module.block.and_then(|block| {
            let (_, rest) = name.split_once(&format!(".{block}."))?;
            Some(format!("h.{block}.{rest}"))
        });
        std::iter::once(name).chain(alias)
    }

    fn is_named(&self, module: ModuleId, name: &str) -> bool {
        let wanted: Vec<&str> = name.strip_prefix(self.family.prefix).unwrap_or(name).split('.').collect();
        let fits = |parts: &[&str]| parts.iter().zip(&wanted).all(|(part, wanted)| is_part(part, wanted));
        self.names_of(module).any(|name| name.split('.').collect::<Vec<_>>().windows(wanted.len()).any(fits))
    }

    fn similar_names(&self, modules: &BTreeSet<ModuleId>, name: &str) -> Vec<String> {
        let parts = |module: &ModuleId| {
            let name = self.layer_name(*module);
            let last = name.rsplit('.').next().map(str::to_owned);
            let block = module.block.map(|block| format!("h.{block}"));
            [Some(name), block, last].into_iter().flatten().collect::<Vec<_>>()
        };
        let known: BTreeSet<String> = modules.iter().flat_map(parts).collect();
        let mut known: Vec<String> = known.into_iter().collect();
        known.sort_by_key(|other| strsim::damerau_levenshtein(name, other));
        known.truncate(SUGGESTIONS);
        known
    }
}

/// Whether a part of a module's name is `wanted`, or a number in the range `wanted`, such as `0-3`.
fn is_part(part: &str, wanted: &str) -> bool {
    let number = |text: &str| text.parse::<usize>().ok();
    let range = wanted.split_once('-').and_then(|(first, last)| Some(number(first)?..=number(last)?));
    part == wanted || range.zip(number(part)).is_some_and(|(range, number)| range.contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_select_blocks_parts_of_blocks_and_layers() {
        let select = |model: &str, names: &str| -> Vec<String> {
            let spec = ModelSpec::named(model).unwrap();
            let modules = spec.modules_named("freeze", names).unwrap();
            modules.into_iter().map(|module| spec.layer_name(module)).collect()
        };
        assert_eq!(select("tiny", "wte, ln_f"), ["wte", "ln_f"]);
        assert_eq!(select("tiny", "h.1-2.mlp"), ["h.1.mlp.c_fc", "h.1.mlp.c_proj", "h.2.mlp.c_fc", "h.2.mlp.c_proj"]);
        assert_eq!(select("tiny", "transformer.h.3").len(), 6);
        assert_eq!(select("tiny", "h.0,h.0-1,c_attn").len(), 14);
        let llama = select("smollm2-135m", "h.29.self_attn.o_proj,layers.29.mlp");
        let [o, gate] = ["layers.29.self_attn.o_proj", "layers.29.mlp.gate_proj"].map(str::to_owned);
        assert!(llama.contains(&o) && llama.contains(&gate) && llama.len() == 4, "{llama:?}");
        assert_eq!(select("smollm2-135m", "h.0-29,embed_tokens,norm").len(), 30 * 9 + 2);
    }
}
