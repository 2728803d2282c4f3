//! Edits a message in the last rows of the terminal, with a history.

use super::screen::KEYS;
use crate::untrusted::sanitize_lines;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{MoveTo, MoveToColumn, Show};
use ratatui::crossterm::event::{
    self, DisableBracketedPaste, EnableBracketedPaste, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers,
};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{Clear, ClearType, disable_raw_mode, enable_raw_mode, is_raw_mode_enabled};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::{Terminal, TerminalOptions, Viewport};
use ratatui_textarea::{CursorMove, TextArea};
use signal_hook::consts::{SIGHUP, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, raise};
use std::io::{self, IsTerminal, Write, stderr, stdin};
use std::mem::ManuallyDrop;
use std::thread;
use std::time::Duration;

const PROMPT: &str = "> ";
/// Rows of a message that are shown at once.
const ROWS: usize = 8;

/// Edits messages on standard error and remembers them.
#[derive(Debug)]
pub(crate) struct MessageEditor {
    area: TextArea<'static>,
    /// Shown before anything is typed.
    hint: &'static str,
    history: Vec<String>,
    /// The position in the history; its length for a new message.
    recalled: usize,
}

/// The effect of a key.
#[derive(Debug, PartialEq, Eq)]
enum Typed {
    Edit,
    Message(String),
    Suspend,
    End,
}

impl MessageEditor {
    /// An editor that shows a hint before anything is typed.
    pub(crate) fn new(hint: &'static str) -> Self {
        let mut editor = Self { area: TextArea::default(), hint, history: Vec::new(), recalled: 0 };
        editor.begin("");
        editor
    }

    /// Restores the terminal before SIGTERM or SIGHUP ends the process.
    pub(crate) fn handle_signals() -> io::Result<()> {
        let mut signals = Signals::new([SIGTERM, SIGHUP])?;
        // On a separate thread, because crossterm's reader does not return within a paste or if the terminal hangs up.
        let handle = move || {
            for signal in signals.forever() {
                if is_raw_mode_enabled().unwrap_or(false) {
                    let _ = disable_raw_mode();
                    let clear = Clear(ClearType::FromCursorDown);
                    let _ = execute!(stderr(), DisableBracketedPaste, MoveToColumn(0), clear, Show);
                }
                let _ = emulate_default_handler(signal);
            }
        };
        thread::Builder::new().name("signals".into()).spawn(handle).map(drop)
    }

    /// The next message; `None` for Ctrl-D.
    pub(crate) fn read(&mut self) -> io::Result<Option<String>> {
        enable_raw_mode()?;
        let message = execute!(stderr(), EnableBracketedPaste).and_then(|()| self.edit());
        execute!(stderr(), DisableBracketedPaste)?;
        disable_raw_mode()?;
        let message = message?;
        for line in message.iter().flat_map(|message| message.lines()) {
            writeln!(stderr(), "{PROMPT}{}", sanitize_lines(line))?;
        }
        Ok(message)
    }

    fn edit(&mut self) -> io::Result<Option<String>> {
        loop {
            let rows = self.area.lines().len().min(ROWS);
            let viewport = Viewport::Inline(rows as u16);
            let backend = CrosstermBackend::new(stderr());
            // Its `Drop` would show the cursor again, and panic if the terminal has hung up.
            let mut terminal = ManuallyDrop::new(Terminal::with_options(backend, TerminalOptions { viewport })?);
            let mut typed = Typed::Edit;
            while typed == Typed::Edit && self.area.lines().len().min(ROWS) == rows {
                terminal.draw(|frame| {
                    let width = Constraint::Length(PROMPT.len() as u16);
                    let [prompt, message] = Layout::horizontal([width, Constraint::Fill(1)]).areas(frame.area());
                    frame.render_widget(Line::raw(PROMPT), prompt);
                    frame.render_widget(&self.area, message);
                })?;
                typed = match next_event()? {
                    Event::Paste(text) => self.paste(&text),
                    Event::Key(key) if key.kind != KeyEventKind::Release => self.key(key),
                    _ => Typed::Edit,
                };
            }
            let top = terminal.get_frame().area().y;
            terminal.show_cursor()?;
            execute!(stderr(), MoveTo(0, top), Clear(ClearType::FromCursorDown))?;
            drop(ManuallyDrop::into_inner(terminal));
            match typed {
                Typed::Edit => {}
                Typed::Message(message) => return Ok(Some(message)),
                Typed::End => return Ok(None),
                Typed::Suspend => {
                    disable_raw_mode()?;
                    raise(SIGTSTP)?;
                    enable_raw_mode()?;
                }
            }
        }
    }

    fn paste(&mut self, text: &str) -> Typed {
        self.area.insert_str(text.replace("\r\n", "\n").replace('\r', "\n"));
        Typed::Edit
    }

    fn key(&mut self, key: KeyEvent) -> Typed {
        let row = self.area.cursor().0;
        let last = self.area.lines().len() - 1;
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Enter if key.modifiers.is_empty() && !self.continues() => return self.accept(),
            KeyCode::Enter => self.area.insert_newline(),
            // A line end that was pasted into a terminal without bracketed paste.
            KeyCode::Char('j') if control => self.area.insert_newline(),
            KeyCode::Char('c') if control => self.begin(""),
            KeyCode::Char('d') if control && self.area.is_empty() => return Typed::End,
            KeyCode::Char('z') if control => return Typed::Suspend,
            KeyCode::Char('u') if control => _ = self.area.delete_line_by_head(),
            KeyCode::Up if row == 0 => self.recall(self.recalled.saturating_sub(1)),
            KeyCode::Down if row == last => self.recall(self.recalled + 1),
            _ => _ = self.area.input(key),
        }
        Typed::Edit
    }

    /// Removes the backslash that ends the cursor's line and continues the message; `false` if there is none.
    fn continues(&mut self) -> bool {
        let ends = self.area.lines()[self.area.cursor().0].ends_with('\\');
        if ends {
            self.area.move_cursor(CursorMove::End);
            self.area.delete_char();
        }
        ends
    }

    fn accept(&mut self) -> Typed {
        let message = self.area.lines().join("\n");
        if !message.trim().is_empty() && self.history.last() != Some(&message) {
            self.history.push(message.clone());
        }
        self.recalled = self.history.len();
        self.begin("");
        Typed::Message(message)
    }

    fn recall(&mut self, at: usize) {
        self.recalled = at.min(self.history.len());
        let text = self.history.get(self.recalled).cloned().unwrap_or_default();
        self.begin(&text);
    }

    /// Continues with a text.
    fn begin(&mut self, text: &str) {
        self.area = TextArea::new(text.split('\n').map(str::to_owned).collect());
        self.area.set_cursor_line_style(Style::default());
        self.area.set_placeholder_text(self.hint);
        self.area.set_placeholder_style(Style::default().add_modifier(Modifier::DIM));
        self.area.move_cursor(CursorMove::Bottom);
        self.area.move_cursor(CursorMove::End);
    }
}

/// The next event. It polls, because crossterm's reader never returns if the terminal hangs up while it reads.
fn next_event() -> io::Result<Event> {
    while stdin().is_terminal() {
        if event::poll(Duration::ZERO)? {
            return event::read();
        }
        thread::sleep(KEYS);
    }
    Err(io::ErrorKind::BrokenPipe.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(editor: &mut MessageEditor, text: &str) {
        for c in text.chars() {
            assert_eq!(editor.key(KeyCode::Char(c).into()), Typed::Edit);
        }
    }

    fn press(editor: &mut MessageEditor, codes: &[KeyCode]) -> Typed {
        codes.iter().fold(Typed::Edit, |_, code| editor.key((*code).into()))
    }

    fn message(text: &str) -> Typed {
        Typed::Message(text.to_owned())
    }

    #[test]
    fn a_message_is_edited_continued_and_recalled() {
        let mut editor = MessageEditor::new("");
        typed(&mut editor, "hlo");
        press(&mut editor, &[KeyCode::Left, KeyCode::Left]);
        typed(&mut editor, "el");
        assert_eq!(press(&mut editor, &[KeyCode::Enter]), message("hello"));
        typed(&mut editor, "two\\");
        assert_eq!(press(&mut editor, &[KeyCode::Enter]), Typed::Edit);
        typed(&mut editor, "lines");
        assert_eq!(editor.key(KeyEvent::new(KeyCode::Enter, KeyModifiers::ALT)), Typed::Edit);
        editor.paste("or\r\nfour");
        assert_eq!(press(&mut editor, &[KeyCode::Enter]), message("two\nlines\nor\nfour"));
        // Up goes to the first row, and then to the message before.
        assert_eq!(press(&mut editor, &[KeyCode::Up, KeyCode::Up, KeyCode::Enter]), message("two\nlines\nor\nfour"));
        assert_eq!(press(&mut editor, &[KeyCode::Up; 5]), Typed::Edit);
        assert_eq!(press(&mut editor, &[KeyCode::Enter]), message("hello"));
        assert_eq!(press(&mut editor, &[KeyCode::Up, KeyCode::Down, KeyCode::Enter]), message(""));
    }

    #[test]
    fn control_keys_clear_end_and_suspend() {
        let mut editor = MessageEditor::new("");
        let control =
            |editor: &mut MessageEditor, c| editor.key(KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL));
        typed(&mut editor, "ab");
        press(&mut editor, &[KeyCode::Home]);
        assert_eq!(control(&mut editor, 'd'), Typed::Edit, "deletes");
        assert_eq!(editor.area.lines(), ["b"]);
        control(&mut editor, 'c');
        assert!(editor.area.is_empty());
        typed(&mut editor, "ab");
        control(&mut editor, 'u');
        assert_eq!([control(&mut editor, 'd'), control(&mut editor, 'z')], [Typed::End, Typed::Suspend]);
    }
}
