//! The fifth tab: generated texts, newest first.

use super::app::Tab;
use super::list::List;
use super::scene::Scene;
use crate::ui::{Canvas, Role, format};

#[derive(Debug, Default)]
pub(super) struct Samples {
    list: List,
}

impl Tab for Samples {
    fn draw(&self, scene: &Scene, canvas: &mut Canvas) {
        let samples = &scene.run().samples;
        let mut inner = canvas.frame(&[(&format!("Samples {}, newest first", samples.len()), Role::Title)]);
        if samples.is_empty() {
            inner.text(1, 0, if scene.can_command() { "none yet: press g" } else { "none" }, Role::Dim);
        }
        let mut y = 0;
        for sample in samples.iter().rev().skip(self.list.selected(samples.len())) {
            if y >= inner.height() {
                break;
            }
            let loss = sample.loss.map_or_else(|| "-".into(), format::loss);
            inner.text(0, y, &format!("step {}   smoothed loss {loss}", sample.step), Role::Title);
            y += 1;
            for (line, prompt) in wrapped(&sample.prompt, &sample.text, inner.width().saturating_sub(2).into()) {
                let (prompt, rest) = line.split_at(prompt);
                inner.spans(2, y, &[(prompt, Role::Train), (rest, Role::Text)]);
                y += 1;
            }
            y += 1;
        }
    }

    fn list<'a>(&'a mut self, scene: &'a mut Scene) -> Option<(&'a mut List, usize)> {
        Some((&mut self.list, scene.run().samples.len()))
    }
}

/// Prompt and text in lines of at most `width` columns, wrapped at any character; each with the number of its bytes
/// that belong to the prompt.
pub(super) fn wrapped(prompt: &str, text: &str, width: usize) -> Vec<(String, usize)> {
    let mut lines = vec![(String::new(), 0, 0)];
    let pieces = prompt.chars().map(|c| (c, true)).chain(text.chars().map(|c| (c, false)));
    for (c, of_prompt) in pieces {
        if c == '\n' {
            lines.push((String::new(), 0, 0));
            continue;
        }
        let shown = format::printable(c.encode_utf8(&mut [0; 4]));
        let columns = format::columns(&shown);
        if lines.last().is_some_and(|(_, _, used)| used + columns > width) {
            lines.push((String::new(), 0, 0));
        }
        if let Some((line, prompt, used)) = lines.last_mut() {
            line.push_str(&shown);
            *used += columns;
            *prompt += if of_prompt { shown.len() } else { 0 };
        }
    }
    lines.into_iter().map(|(line, prompt, _)| (line, prompt)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_broken_by_columns_and_knows_its_prompt() {
        let lines = wrapped("ab", "cd\nef\u{1b}漢字", 3);
        let expected = [("abc", 2), ("d", 0), ("ef ", 0), ("漢", 0), ("字", 0)];
        assert_eq!(lines, expected.map(|(line, prompt)| (line.to_owned(), prompt)));
    }
}
