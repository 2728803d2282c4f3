//! The fourth tab: all events except plain steps, newest last, or one of them with all of its fields.

use super::app::Tab;
use super::keys::Action;
use super::list::List;
use super::samples::wrapped;
use super::scene::Scene;
use crate::screen::words;
use crate::telemetry::{Event, EventRow, RunState};
use crate::ui::{Canvas, Role, format};
use ratatui::layout::Position;
use serde_json::Value;
use std::cell::Cell;

#[derive(Debug, Default)]
pub(super) struct Events {
    list: List,
    /// The event that is open, and its first visible line, which drawing limits.
    pub(super) open: Option<(Box<EventRow>, Cell<usize>)>,
}

impl Events {
    /// The filtered events, newest first.
    fn rows<'a>(&self, run: &'a RunState) -> Vec<&'a EventRow> {
        let filter = &self.list.filter;
        let rows = run.events.iter().rev();
        rows.filter(|row| filter.is_empty() || words::listed(row).contains(filter.as_str())).collect()
    }

    /// Opens the event under the cursor.
    fn open(&mut self, scene: &Scene) {
        let rows = self.rows(scene.run());
        self.open = rows.get(self.list.selected(rows.len())).map(|row| (Box::new((*row).clone()), Cell::new(0)));
    }
}

impl Tab for Events {
    fn draw(&self, scene: &Scene, canvas: &mut Canvas) {
        if let Some((row, top)) = &self.open {
            draw_event(row, top, canvas);
            return;
        }
        let rows = self.rows(scene.run());
        let selected = self.list.selected(rows.len());
        let hidden = self.list.hidden(rows.len(), canvas.height().saturating_sub(2));
        // Show how many newer events are below the visible rows.
        let below = if hidden > 0 { format!("   {hidden} newer below") } else { String::new() };
        let title = format!("Events {}{}{below}", rows.len(), self.list.label());
        let mut inner = canvas.frame(&[(&title, Role::Title)]);
        if rows.is_empty() {
            inner.text(1, 0, "none", Role::Dim);
        }
        let shown: Vec<_> = rows.iter().enumerate().skip(hidden).take(inner.height().into()).collect();
        for (y, (at, row)) in (0..).zip(shown.into_iter().rev()) {
            let x = inner.text(0, y, &format::clock(row.s), Role::Dim);
            let x = inner.text(x + 1, y, &format!("{:>7} ", row.step), Role::Dim);
            let (glyph, role) = words::glyph(&row.event);
            inner.glyph(x, y, glyph, role);
            let room = inner.width().saturating_sub(x + 2);
            inner.shortened(x + 2, y, &with_short_name(row, room.into()), Role::Text);
            if at == selected && selected > 0 {
                inner.highlight(y, Role::Selected);
            }
        }
    }

    fn act(&mut self, scene: &mut Scene, action: Action, shown: bool) {
        if action == Action::Details && shown {
            self.open(scene);
        }
    }

    fn clicked(&mut self, scene: &mut Scene, (_, height): (u16, u16), at: Position) -> Option<usize> {
        let height = height.saturating_sub(2);
        let line = at.y.checked_sub(1).filter(|line| *line < height && self.open.is_none())?;
        let rows = self.rows(scene.run()).len();
        let hidden = self.list.hidden(rows, height);
        let shown = (rows - hidden).min(height.into());
        let from_bottom = shown.checked_sub(usize::from(line) + 1)?;
        if self.list.click(hidden + from_bottom) {
            self.open(scene);
        }
        None
    }

    fn scroll(&mut self, scene: &mut Scene, by: isize) {
        match &self.open {
            Some((_, top)) => top.set(top.get().saturating_add_signed(by)),
            None => self.list.scroll(by, self.rows(scene.run()).len()),
        }
    }

    fn wheel(&mut self, scene: &mut Scene, by: isize) {
        // The list is newest last.
        self.scroll(scene, if self.open.is_some() { by } else { -by });
    }

    fn close(&mut self) -> bool {
        self.open.take().is_some()
    }

    fn leave(&mut self) {
        self.open = None;
    }

    fn list<'a>(&'a mut self, scene: &'a mut Scene) -> Option<(&'a mut List, usize)> {
        let rows = self.rows(scene.run()).len();
        self.open.is_none().then_some((&mut self.list, rows))
    }
}

/// The event's line. If it ends within a tensor's name after `room` characters, that name is shortened in its middle.
fn with_short_name(row: &EventRow, room: usize) -> String {
    let line = format::printable(&words::listed(row));
    let lists_tensors = matches!(row.event, Event::Overflow(_) | Event::UnderflowOnset(_));
    let Some((cut, _)) = line.char_indices().nth(room).filter(|_| lists_tensors) else { return line };
    let (before, rest) = line.split_at(line[..cut].rfind(' ').map_or(0, |space| space + 1));
    let name = rest.split([' ', ',']).next().unwrap_or_default();
    if !name.starts_with(char::is_alphabetic) || !name.contains('.') {
        return line;
    }
    // A whole name would hide that others follow.
    let room = (room - before.chars().count()).min(name.chars().count() - 1);
    format!("{before}{}", format::shortened_name(name, room))
}

/// Draws an event, scrolled to line `top`, over the whole tab.
fn draw_event(row: &EventRow, top: &Cell<usize>, canvas: &mut Canvas) {
    let (glyph, role) = words::glyph(&row.event);
    let at = format!(" step {} at {}", row.step, format::clock(row.s));
    let mut inner =
        canvas.frame(&[(&glyph.to_string(), role), (&at, Role::Title), ("   j k scroll   Esc closes", Role::Dim)]);
    let lines = lines(row, inner.width().into());
    top.set(top.get().min(lines.len().saturating_sub(usize::from(inner.height()))));
    for (y, (key, value)) in (0..inner.height()).zip(&lines[top.get()..]) {
        let x = inner.text(1, y, key, Role::Dim);
        inner.text(x, y, value, Role::Text);
    }
}

/// The event's lines: its text, wrapped to `width`, then its fields.
fn lines(row: &EventRow, width: usize) -> Vec<(String, String)> {
    let sentence = wrapped("", &format::printable(&words::listed(row)), width.saturating_sub(2));
    let mut lines: Vec<_> = sentence.into_iter().map(|(line, _)| (String::new(), line)).collect();
    lines.push(Default::default());
    fields(serde_json::to_value(&row.event).unwrap_or_default(), "", &mut lines);
    if row.more > 0 {
        lines.push((String::new(), format!("and {} more tensors, in the run's log", row.more)));
    }
    lines
}

/// The leaves of a value, each with its path; an array of scalars and a tensor's row take one line.
fn fields(value: Value, path: &str, lines: &mut Vec<(String, String)>) {
    let within = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    let plain = |value: &Value| !value.is_object() && !value.is_array();
    match value {
        Value::Object(map) if map.contains_key("name") => {
            let text = map.iter().filter(|(key, value)| *key != "name" && plain(value));
            let text: Vec<_> = text.map(|(key, value)| format!("{key} {}", leaf(value))).collect();
            lines.push((format!("{path} {}: ", leaf(&map["name"])), text.join("  ")));
        }
        Value::Object(map) => map.into_iter().for_each(|(key, value)| fields(value, &within(&key), lines)),
        Value::Array(values) if values.iter().all(plain) => {
            lines.push((format!("{path}: "), values.iter().map(leaf).collect::<Vec<_>>().join(" ")));
        }
        Value::Array(values) => values.into_iter().for_each(|value| fields(value, path, lines)),
        Value::Null => {}
        value => lines.push((format!("{path}: "), leaf(&value))),
    }
}

fn leaf(value: &Value) -> String {
    format::printable(&value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}
