//! Shared by the program's screens: the key table, and taking over and restoring the terminal. Nothing here
//! depends on a screen's content.

pub(crate) mod keys;
mod message;
mod screen;
mod signals;

pub(crate) use keys::Binding;
pub(crate) use message::MessageEditor;
pub(crate) use screen::Screen;
pub(crate) use signals::{CTRL_C_REPEAT, SAVING, ShutdownFlag, interrupt_flag};
pub use signals::{SignalHandler, ignore_stop_signals, outlive_file_size_limit, restore_before_exit, set_training};
