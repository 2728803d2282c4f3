//! `--ascii`: replaces every non-ASCII character of a finished frame by an ASCII equivalent.

use ratatui::buffer::Buffer;

/// Replaces in place. Characters without an equivalent, as in generated text, become `?`.
pub(crate) fn to_ascii(buffer: &mut Buffer) {
    for cell in &mut buffer.content {
        let symbol = cell.symbol();
        if !symbol.is_ascii() {
            let replaced = symbol.chars().next().map_or(' ', replacement);
            cell.set_char(replaced);
        }
    }
}

/// The ASCII equivalent of a character.
pub(super) fn replacement(c: char) -> char {
    match c {
        '─' | '┄' | '·' | '⠒' | '⠤' | '▷' => '-',
        '│' | '┊' | '┃' => '|',
        '├' => '[',
        '┤' => ']',
        '┌' | '┐' | '└' | '┘' | '┴' | '┬' | '┼' | '▅' | '▆' => '+',
        '∙' | '▁' | '▂' => '.',
        '◆' => '*',
        '✕' | '×' => 'x',
        '▾' => 'v',
        '▴' => '^',
        '●' => 'o',
        '▶' | '▸' | '→' => '>',
        '←' => '<',
        '‖' | '━' => '=',
        '■' | '▇' | '█' => '#',
        '∞' => 'i',
        '…' => '~',
        '⏎' => '/',
        '°' => '\'',
        '▃' | '▄' => ':',
        '░' => '_',
        braille @ '\u{2800}'..='\u{28ff}' => match (braille as u32 & 0xff).count_ones() {
            0 => ' ',
            1 | 2 => '.',
            3 | 4 => ':',
            _ => '#',
        },
        _ => '?',
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::layout::Rect;
    use ratatui::style::Style;

    #[test]
    fn nothing_beyond_ascii_is_left() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 12, 1));
        buffer.set_string(0, 0, "├●┤✕∞⣿⠁▅é─━", Style::new());
        to_ascii(&mut buffer);
        let text: String = buffer.content.iter().map(ratatui::buffer::Cell::symbol).collect();
        assert_eq!(text, "[o]xi#.+?-= ");
    }
}
